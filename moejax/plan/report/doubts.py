"""What makes a prediction doubtful, in one line each."""

from collections import defaultdict

from moejax.plan.cluster.device import Device
from moejax.plan.price.candidate import PricedPlan
from moejax.plan.price.cost import SimulatedStep, alone

FAR_BELOW = 100.0  # times: a product so much smaller than the smallest measured one is a guess
NOTEWORTHY = 0.1  # share of the step that such products take; below it they change no choice


def small_products(plan: PricedPlan, device: Device) -> str | None:
    """Returns a warning where products far below a device's smallest are much of a step.

    A product below the smallest measured one takes as long as that one. Where a topology file has
    one large product only, small products, as a router's, seem to take seconds.
    """
    seconds: dict[str, float] = defaultdict(float)
    for share, simulated in plan.parts:
        _add(simulated, device, share, seconds)
    dtype = max(seconds, key=lambda name: seconds[name], default="")
    if not dtype or sum(seconds.values()) < NOTEWORTHY * plan.seconds:
        return None
    least = device.curve(dtype)[0][0]
    return (
        f"warning: {sum(seconds.values()) / plan.seconds:.0%} of the step are products of less "
        f"than 1/{FAR_BELOW:g} of the smallest that the topology has, which count as slow as that "
        f"one (`device.products` of {dtype} begin at {least:.3g} FLOPs). Add smaller products to "
        "the topology file, or probe the devices."
    )


def _add(step: SimulatedStep, device: Device, times: float, seconds: dict[str, float]) -> None:
    """Adds the seconds of products far below the smallest measured ones, by dtype."""
    for task, op in enumerate(step.ops):
        if task in step.inside:
            trip, count = step.inside[task]
            _add(trip, device, times * count, seconds)
        elif op.kind == "product" and op.flops * FAR_BELOW < device.curve(op.dtype)[0][0]:
            seconds[op.dtype] += times * device.program_overhead * alone(op, device)
