"""``python -m ortholand``: what a bug report needs. It works without any extra.

Any other arguments are passed to the command ``ortholand`` of the laboratory, ortholand-lab.
"""

import sys

from ortholand.about import table


def main() -> None:
    """Entry point."""
    if sys.argv[1:] in ([], ["info"]):
        print(table())
        return
    try:
        from ortholand_lab.cli import main as command
    except ModuleNotFoundError as missing:
        sys.exit(
            f"{sys.argv[1]!r} is a command of the laboratory, but {missing.name} is not installed. "
            "In a clone of ortholand run: pip install ./lab"
        )
    command()


if __name__ == "__main__":
    main()
