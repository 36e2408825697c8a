"""`aggregate`: a class whose fields are values of a Gluon kernel, so that they travel as one argument.

Triton 3.8 has it as `triton.aggregate`; before, it is a private name that wants a constructor.
"""

import triton
from triton.language import core

if hasattr(triton, "aggregate"):
    aggregate = triton.aggregate
else:

    def aggregate(cls):
        """The class with a constructor that takes its fields in order."""
        names = tuple(cls.__annotations__)

        def init(self, *values):
            for name, value in zip(names, values, strict=True):
                setattr(self, name, value)

        init.__triton_builtin__ = True  # type: ignore[attr-defined]
        cls.__init__ = init
        return core._aggregate(cls)  # type: ignore[attr-defined]
