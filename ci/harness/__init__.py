"""The no-GPU test harness: vLLM on a CPU box, under a pretended platform.

`harness.plugin` is a pytest plugin (``-p harness.plugin``). The other modules
are usable without pytest:

- `bootstrap`: what a process needs before it imports vLLM from a source tree.
- `platforms`: the table of platforms and ``use(name)``, which pretends one.
- `derived`: module constants that vLLM computed from the platform.
- `state`: the platform state as a snapshot that can be compared and restored.
- `aiter` and `fake_amdsmi`: stand-ins for these packages.
- `triton_interpreter`: bfloat16 and FP8 as the hardware does them.
- `report`: the machine-readable report of a test session.
"""


class HarnessError(RuntimeError):
    """The harness cannot do what it promises, and says why."""
