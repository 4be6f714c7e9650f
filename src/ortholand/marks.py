"""Marks: a module's own record of which of its weights are orthogonal, and with which options.

The record is an attribute of the module that no other library reads. It is keyed by name, so it
applies to whatever the parameter with that name becomes (cast, moved, replaced by a DTensor,
loaded). Copies and pickles of the module carry it, wrappers leave it alone, and ``state_dict``
does not contain it. An optimizer that gets parameters without their modules looks for them in the
records of all modules that exist (:func:`marks_on`).
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

RECORD = "_orthogonal_weights"

Options = dict[str, Any]


class Marked(NamedTuple):
    """A marked parameter: its module's name and its own, and the options of its mark."""

    name: str
    parameter: nn.Parameter
    options: Options


class Record:
    """The marks of one module, and its own dictionaries of parameters and children.

    These dictionaries are copied and pickled with the module, so its copy has a record of its own
    parameters. A reference to the module would be a cycle, which keeps memory from being freed.
    """

    def __init__(self, module: nn.Module, marks: dict[str, Options]) -> None:
        self.__setstate__(
            {"marks": marks, "parameters": module._parameters, "children": module._modules}
        )

    def __setstate__(self, state: dict[str, Any]) -> None:  # also of copies
        self.marks: dict[str, Options] = state["marks"]
        self.parameters: dict[str, nn.Parameter | None] = state["parameters"]
        self.children: dict[str, nn.Module | None] = state["children"]
        _RECORDS.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)

    def ingredients(self, name: str) -> Iterator[nn.Parameter | None]:
        """The parameters from which a marked weight is computed, if it is none any more."""
        chains = self.children.get("parametrizations")
        if isinstance(chains, nn.ModuleDict) and name in chains:
            yield from chains[name].parameters()
        yield from (self.parameters.get(f"{name}_{ending}") for ending in _HOOKED)


_RECORDS: WeakSet[Record] = WeakSet()


def marks_of(module: nn.Module) -> Mapping[str, Options]:
    """The marks on a module's own parameters (not its children's), by name."""
    # getattr would find the attribute on torch.compile's wrapper around a module.
    record = vars(module).get(RECORD)
    return record.marks if record else {}


def marks_on(parameters: Collection[Tensor]) -> dict[Tensor, Options]:
    """Which of some parameters are marked in the modules that hold them, and with which options."""
    found: dict[Tensor, Options] = {}
    for record in _RECORDS:
        for name, options in record.marks.items():
            p = record.parameters.get(name)
            if p is not None and p in parameters and found.setdefault(p, options) != options:
                one, other = sorted((found[p], options), key=repr)  # records have no order
                raise ValueError(
                    f"A weight has one mark, but {name!r} of shape {tuple(p.shape)} is shared by "
                    f"modules that mark it with {one} and {other}. Mark it once, or identically."
                )
            if p is None and any(q in parameters for q in record.ingredients(name)):
                raise ValueError(
                    f"An orthogonal weight must be a parameter of its module, but {name!r}, which "
                    "is marked, is computed from others by a parametrization. Remove that first, "
                    "or the mark: ortholand.marks.unmark(module, name)."
                )
    return found


def mark(module: nn.Module, name: str, options: Options) -> None:
    """Record that a parameter is orthogonal, replacing any earlier record."""
    # A new record: a shallow copy of the module keeps the old one.
    vars(module)[RECORD] = Record(module, {**marks_of(module), name: options})


def unmark(module: nn.Module, name: str = "weight") -> None:
    """Undo :func:`ortholand.orthogonal`: the weight keeps its values but is unconstrained.

    >>> import ortholand as ol
    >>> layer = ol.orthogonal(nn.Linear(3, 3))
    >>> unmark(layer)
    >>> marks_of(layer)
    {}
    """
    marks = dict(marks_of(module))
    if marks.pop(name, None) is None:
        raise ValueError(
            f"Only a marked weight can be unmarked, but {name!r} of this {type(module).__name__} "
            f"is not. Marked are: {', '.join(marks) or 'none'}."
        )
    vars(module)[RECORD] = Record(module, marks)


def marked(model: nn.Module) -> Iterator[Marked]:
    """Every mark of a model with its current parameter; raises if that parameter is missing."""
    for path, module in model.named_modules():
        for name, options in marks_of(module).items():
            where = f"{path}.{name}" if path else name
            yield Marked(where, own_parameter(module, name, where), options)


class Computed(NamedTuple):
    """A weight that a module computes from other parameters, its ingredients."""

    path: str  # of the module in the model
    module: nn.Module
    name: str  # of the weight in the module
    ingredients: tuple[nn.Parameter, ...]
    remedy: str

    @property
    def label(self) -> str:
        """The weight's name in the model."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def error(self, label: str) -> ValueError:
        """The error for a selector or a mark that means this weight or an ingredient."""
        module = f"model.get_submodule({self.path!r})" if self.path else "module"
        return ValueError(
            f"An orthogonal weight must be a parameter of its module, but {label!r} of a "
            f"{type(self.module).__name__} is computed by {self.remedy}"
            f"({module}, {self.name!r}), or leave the weight out."
        )


_PARAMETRIZED = (
    "a parametrization. Remove that first: ortholand.untrivialize_(model) if it is one of "
    "ortholand's, else torch.nn.utils.parametrize.remove_parametrizations"
)
_NORMED = "weight_norm. Remove that first: torch.nn.utils.remove_weight_norm"
# torch's older functions compute a weight in a hook, from parameters with these endings.
_HOOKED = {
    "g": _NORMED,
    "v": _NORMED,
    "orig": (
        "spectral_norm or pruning. Remove that first: torch.nn.utils.remove_spectral_norm or "
        "torch.nn.utils.prune.remove"
    ),
}


def computed_weights(model: nn.Module) -> Iterator[Computed]:
    """The weights of a model that are not parameters but are computed from some."""
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            for name, chain in module.get_submodule("parametrizations").named_children():
                originals = tuple(chain.parameters(recurse=False))
                yield Computed(path, module, name, originals, _PARAMETRIZED)
        for name, parameter in module.named_parameters(recurse=False):
            weight, _, ending = name.rpartition("_")
            if ending in _HOOKED and isinstance(vars(module).get(weight), Tensor):
                yield Computed(path, module, weight, (parameter,), _HOOKED[ending])


def own_parameter(module: nn.Module, name: str, label: str) -> nn.Parameter:
    """The parameter with that name, which must be the module's own, plain, and have a shape."""
    rule = f"An orthogonal weight must be a parameter of its module, but {label!r}"
    if isinstance(module, parametrize.ParametrizationList):
        raise ValueError(f"{rule} only serves to compute one. Remove the parametrization first.")
    parameter = module._parameters.get(name)
    for weight in computed_weights(module):
        is_ingredient = any(parameter is p for p in weight.ingredients)
        if weight.module is module and (is_ingredient or weight.name == name):
            raise weight.error(label)
    if parameter is None:
        own = ", ".join(n for n, p in module._parameters.items() if p is not None)
        raise ValueError(
            f"{rule} is not a parameter of this {type(module).__name__}, which has: "
            f"{own or 'none'}.{_advice_on_names(module, name, own)}"
        )
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(
            f"{rule} of a {type(module).__name__} has no shape yet. Run a forward pass, or give "
            "the layer its sizes, and mark it then."
        )
    return parameter


def _advice_on_names(module: nn.Module, name: str, own: str) -> str:
    if name in marks_of(module):
        return " Remove its mark, which is older: ortholand.marks.unmark(module, name)."
    last = name.rpartition(".")[2]
    for path, child in module.named_modules():
        if path and child._parameters.get(last) is not None and name in (last, f"{path}.{last}"):
            return (
                " Mark a weight on the module that holds it: "
                f"ortholand.orthogonal(module.get_submodule({path!r}), {last!r})."
            )
    return " Give one of these names." if own else " Give the module that holds the weight."
