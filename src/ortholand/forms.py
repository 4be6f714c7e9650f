"""Objects that offer one thing in several forms: a reference, and faster ones beside it."""


def withdraw_other_forms(cls: type, forms: tuple[str, ...]) -> None:
    """Set to None the faster forms that a class inherits while it redefines anything of its own.

    They would do what its parent does. The first form is the reference, which is always there.
    """
    own = {name for name, value in vars(cls).items() if callable(value) or name in forms}
    if own - {"__init__", "__init_subclass__"}:
        for name in forms[1:]:
            if name not in own:
                setattr(cls, name, None)
