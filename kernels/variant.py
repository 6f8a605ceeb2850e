"""Variants: kernels with the types and constants with which `make aot` compiles them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """A Triton kernel at one set of types and constants.

    Wrappers that launch a kernel take constants, warps and stages from the same plan as its
    variants, so that what is compiled ahead of time is what runs.
    """

    name: str
    """Operation, model and batch, such as `bitnet-2b4t.qkv rows=1`."""
    kernel: Any
    """The `triton.jit` function."""
    signature: dict[str, str]
    """Triton type of each run-time argument by its name: `*fp32`, `*i8`, `i32`, …"""
    constants: dict[str, Any]
    """Value of every `tl.constexpr` argument."""
    divisible: frozenset[str] = frozenset()
    """Names of the arguments that are multiples of 16: pointers to whole tensors, row sizes."""
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 1
    """Number of programs of one launch; 1 stands for any number up to one per multiprocessor."""
    launch_pdl: bool = False
    expects: tuple[str, ...] = ()
    """Machine instructions (SASS) that must occur, such as `IDP.4A` or `HGMMA`."""
    bytes_moved: int = 0
    """Minimum bytes that one launch must move to and from memory."""
    step: str | None = None
    """Part of a decode step, such as `qkv`, for which a layer launches this kernel once; None if
    the kernel is not launched by layers."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def instructions(self) -> tuple[str, ...]:
        """The expected instructions; a dependent launch must also wait and release the next one."""
        return (*self.expects, "ACQBULK", "PREEXIT") if self.launch_pdl else self.expects

    @property
    def kernel_name(self) -> str:
        """Name of the kernel as `module.function`, also for interpreted kernels."""
        function = self.kernel.fn
        return f"{function.__module__}.{function.__name__}"

    @property
    def dependent(self) -> Variant | None:
        """Return the variant of the dependent launch; None if the kernel does not have one."""
        if self.constants.get("PDL") is not False:
            return None
        return replace(self, constants={**self.constants, "PDL": True}, launch_pdl=True)

    @property
    def key(self) -> str:
        """A string that is equal for variants with equal compilations, whatever their names."""
        divisible, options = sorted(self.divisible), sorted(self.options.items())
        launch = self.num_warps, self.num_stages, self.launch_pdl, options
        types, constants = sorted(self.signature.items()), sorted(self.constants.items())
        return repr((self.kernel_name, types, constants, divisible, launch))
