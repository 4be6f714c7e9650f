"""What pytest leaves out: modules whose doctests cannot be looked for without their host."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("peft") else ["src/ortholand/integrations/peft"]
