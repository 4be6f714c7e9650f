"""What a method is to the loop that drives it."""

from typing import Protocol

from ortholand.solve.points import Point, Terrain


class Method(Protocol):
    """One file per method: how to go from a point to the next."""

    patience: float  # iterations without progress that are usual for it

    def start(self, terrain: Terrain, point: Point) -> None:
        """Get ready at the first point. Evaluations here are counted too."""
        ...

    def advance(self, point: Point) -> Point | None:
        """The next point; None if none was found that is better."""
        ...

    def restart(self) -> bool:
        """Forget the past; False if there was nothing to forget."""
        ...
