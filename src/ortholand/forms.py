"""Objects that offer one computation in several forms: a reference, and faster ones."""

from types import MethodType
from typing import Any, ClassVar


class OfferedInForms:
    """A class whose faster forms are offered only while they match its reference form.

    A subclass that redefines anything inherits no faster form, which would do what its parent
    does. Nor does a class offer any if its reference was patched, on the class or on the object.

    Attributes:
        reference: the name of the reference form, a method.
        forms: names of the faster forms; a form that is not available is None.
    """

    reference: ClassVar[str]
    forms: ClassVar[tuple[str, ...]]
    _defined: ClassVar[Any]  # the reference that the class was created with

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {name for name in vars(cls) if not name.startswith("__")} - {"name", *_OF_BASES}
        parents = [base for base in cls.__mro__[1:] if "_defined" in vars(base)]
        mixed_in = bool(parents) and getattr(cls, cls.reference) is not parents[0]._defined
        if own or mixed_in:
            for name in cls.forms:
                if name not in own:
                    setattr(cls, name, None)
        cls._defined = getattr(cls, cls.reference)

    @property
    def is_patched(self) -> bool:
        """Whether the reference is no longer the one that the faster forms were made for."""
        defined = type(self)._defined
        if getattr(type(self), self.reference) is not defined:
            return True
        # Some that undo a patch (pytest 8) leave the method with the object: it is what it was.
        own = vars(self)
        return self.reference in own and own[self.reference] != MethodType(defined, self)


_OF_BASES = ("reference", "forms", "_defined", "_abc_impl")
