"""Turns a stock model into a dedicated one: options, ranks, routing of parameters, placeholders."""
