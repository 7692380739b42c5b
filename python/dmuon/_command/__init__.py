"""The command `dmuon`: plans before there is a GPU."""
