"""Docstrings are run where what they import is installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("peft") else ["ortholand/integrations/peft/*"]
