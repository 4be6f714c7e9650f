"""What pytest leaves out: modules whose doctests cannot be looked for without their host."""

from importlib.util import find_spec

_FOLDER = "src/ortholand/integrations"
_HOSTS = {"peft": "peft", "lightning": "lightning.py", "transformers": "transformers.py"}
collect_ignore = [f"{_FOLDER}/{path}" for host, path in _HOSTS.items() if not find_spec(host)]
