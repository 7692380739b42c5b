import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))  # the pages' blocks
sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "site"))  # the hooks of the site
