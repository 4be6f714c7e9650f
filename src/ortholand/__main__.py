"""``python -m ortholand``: what a bug report needs. It works without any extra.

Any arguments are passed to the command ``ortholand``, which needs ``ortholand[experiments]``.
"""

import sys

from ortholand.about import table


def main() -> None:
    """Entry point."""
    if sys.argv[1:] in ([], ["info"]):
        print(table())
        return
    from ortholand.lab.cli import main as command  # here: it needs more than the library

    command()


if __name__ == "__main__":
    main()
