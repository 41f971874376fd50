"""One colour an adapter, the same in pictures and on pages. Stands for nothing in vLLM (v0.22.1)."""

# Okabe and Ito's colours, which colour-blind readers can distinguish, then darker ones for a crowd of adapters.
ADAPTER_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442"]
ADAPTER_COLOURS += ["#332288", "#117733", "#882255", "#999933", "#661100"]
BASE_COLOUR = "#8C8C8C"


def adapter_colours(adapters: list[str]) -> dict[str | None, str]:
    """A colour for each adapter, the same in every picture of the same adapters, and one for base (None)."""
    colours: dict[str | None, str] = {None: BASE_COLOUR}
    for i, adapter in enumerate(sorted(adapters)):
        colours[adapter] = ADAPTER_COLOURS[i % len(ADAPTER_COLOURS)]
    return colours
