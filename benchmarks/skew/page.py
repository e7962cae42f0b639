"""The page about uneven experts."""

import json
from typing import Any

WORTH = 0.05  # of the busiest device over the mean: less is called nothing
BAR = 1.1  # under it copies of hot experts are not worth building, as was said before
WAYS_BALANCED = ("balance loss", "selection bias", "bias and sequence loss")
SLOTS = {"in order": "in order", "rearranged": "rearranged"} | {
    str(n): f"{n} slot{'s' * (n > 1)}" for n in (1, 2, 3)
}
COLUMNS = {"expert": "expert", "4": "4 devices", "8": "8", "16": "16"}


def pair(found: dict[str, Any]) -> str:
    """Median and worst of the layers."""
    return f"{found['median']:.2f} / {found['worst']:.2f}"


def table(heads: list[str], rows: list[list[str]], texts: int = 1) -> list[str]:
    """A table; columns behind the first ones are numbers."""
    lines = [f"| {' | '.join(heads)} |"]
    lines.append("|" + "---|" * texts + "---:|" * (len(heads) - texts))
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def sizes(result: dict[str, Any]) -> list[str]:
    """The last step on held-out text of the kind of training."""
    rows = []
    cases = {way: one["texts"]["own"] for way, one in result["ways"].items()}
    for way, found in {**cases, "even draws": result["even"]}.items():
        for size, by in found.items():
            rows.append([way, size, *(pair(by[column]) for column in COLUMNS)])
    return table(["balanced by", "tokens", *COLUMNS.values()], rows, 2)


def over_steps(result: dict[str, Any]) -> list[str]:
    """The busiest of eight devices by step."""
    steps = list(next(iter(result["ways"].values()))["steps"])
    rows = [
        [way, *(pair(one["steps"][step]["4k"]["8"]) for step in steps)]
        for way, one in result["ways"].items()
    ]
    return table(["balanced by", *(f"step {step}" for step in steps)], rows)


def by_layer(result: dict[str, Any]) -> list[str]:
    """The busiest of eight devices by layer."""
    rows = [
        [way, *(f"{x:.2f}" for x in one["texts"]["own"]["4k"]["8"]["layers"])]
        for way, one in result["ways"].items()
    ]
    return table(["balanced by", *(str(n) for n in range(len(rows[0]) - 1))], rows)


def on_texts(result: dict[str, Any]) -> list[str]:
    """The busiest of eight devices on each kind of text."""
    kinds = list(next(iter(result["ways"].values()))["texts"])
    rows = [
        [way, *(pair(one["texts"][kind]["4k"]["8"]) for kind in kinds)]
        for way, one in result["ways"].items()
    ]
    return table(["balanced by", *kinds], rows)


def lasting(result: dict[str, Any]) -> list[str]:
    """How long the hottest eighth stays hot."""
    rows, first = [], next(iter(result["ways"].values()))["lasting"]
    for way, one in result["ways"].items():
        cells = [
            f"{100 * found['median']:.0f} / {100 * found['worst']:.0f} %"
            for by in one["lasting"].values()
            for found in by.values()
        ]
        rows.append([way, *cells])
    heads = [
        f"{name}{f', {apart} apart' if name != 'steps' else ' ' + apart}"
        for name, by in first.items()
        for apart in by
    ]
    return table(["balanced by", *heads], rows)


def foretold(result: dict[str, Any]) -> list[str]:
    """How well the next layer's experts are told."""
    names = {"0, 1": "popularity", "id": "the token's id"}
    for key in next(iter(result["ways"].values()))["foretold"]:
        length, _, least = key.partition(", ")
        few = "" if least == "1" else f", seen {least} times"
        names.setdefault(key, f"path of {length}{few}")
    rows = []
    for key, name in names.items():
        found = [one["foretold"][key] for one in result["ways"].values()]
        cells = [f"{100 * one['first']:.0f} / {100 * one['share']:.0f} %" for one in found]
        seen = [f"{100 * one['seen']:.0f}" for one in found if "seen" in one]
        rows.append([name, *cells, ", ".join(seen)])
    chance = 100 * result["setup"]["choices"] / result["setup"]["experts"]
    rows.insert(0, ["chance", *[f"{chance:.0f} / {chance:.0f} %"] * len(result["ways"]), ""])
    return table(["told by", *result["ways"], "% that had the path"], rows)


def placements(result: dict[str, Any], kind: str) -> list[str]:
    """The busiest device by placement and table."""
    rows = []
    for way, one in result["ways"].items():
        for devices, by in one["placed"][kind].items():
            cells = [pair(by["in order"]["same"])]
            for name in list(SLOTS)[1:]:
                of_tables = list(by[name].values())[: 3 if name == "rearranged" else None]
                cells.append(", ".join(f"{found['median']:.2f}" for found in of_tables))
            rows.append([way, devices, *cells])
    return table(["balanced by", "devices", *SLOTS.values()], rows, 2)


def worst(result: dict[str, Any], ways: tuple[str, ...], size: str) -> tuple[float, str]:
    """The busiest device over the mean in the worst layer of some ways, and where that was."""
    found = [
        (by["worst"], f"{way}, {devices} devices")
        for way in ways
        if way in result["ways"]
        for devices, by in result["ways"][way]["texts"]["own"][size].items()
        if devices != "expert"
    ]
    return max(found)


def copied(result: dict[str, Any], way: str) -> str:
    """What placement gives on eight devices by table, medians of layers."""
    by = result["ways"][way]["placed"]["own"]["8"]
    texts = []
    for name in ("rearranged", "1", "3"):
        found = {table: f"{one['median']:.2f}" for table, one in by[name].items()}
        text = f"{SLOTS[name]} {found['same']}, {found['before']} and {found['older']}"
        if name != "rearranged":
            split = [found[f"{table}, split now"] for table in ("before", "older")]
            text += f" ({' and '.join(split)} where old copies are split by its own counts)"
        texts.append(text)
    return (
        f"- The busiest of 8 devices, experts in order ({way}): "
        f"{by['in order']['same']['median']:.2f}. With the table of the same micro-batch, of the "
        f"four before it, and of the recorded step before: {'; '.join(texts)}."
    )


def by_age(result: dict[str, Any], way: str) -> str:
    """What slots are worth by the age of their table, on eight devices."""
    by = result["ways"][way]["placed"]["own"]["8"]
    plain = by["in order"]["same"]["median"]
    texts = []
    for table_name, words in (("before", "the four before"), ("older", "the recorded step before")):
        slots = min(by[str(n)][table_name]["median"] for n in (1, 2, 3))
        moved = by["rearranged"][table_name]["median"]
        worth = "do not pay" if slots > plain - WORTH else "help"
        than = "no more than" if slots > moved - WORTH else "more than"
        texts.append(f"with the table of {words} copies {worth} and bring {than} rearranging")
    now = max(by[str(n)]["older, split now"]["median"] for n in (1, 2, 3))
    texts.append(
        f"with those old copies, and rows split by the counts of the micro-batch itself, at most "
        f"{now:.2f} is left of {plain:.2f}"
    )
    return f"- {way[0].upper()}{way[1:]}, 8 devices: {'; '.join(texts)}."


def lina(result: dict[str, Any]) -> str:
    """Whether longer paths tell more, as Lina found."""
    told = {
        way: [one["foretold"][f"{n}, {least}"]["share"] for n in (1, 3, 6) for least in (8,)]
        for way, one in result["ways"].items()
    }
    ways = [way for way, shares in told.items() if shares == sorted(shares)]
    each = "; ".join(
        f"{way}: {', '.join(f'{100 * x:.1f}' for x in shares)} %" for way, shares in told.items()
    )
    return (
        f"Of the experts that a token takes, so many are among the foretold with paths of 1, 3 and "
        f"6 layers (seen 8 times): {each}. They grow with each step in {len(ways)} of {len(told)}."
    )


def follows(result: dict[str, Any]) -> list[str]:
    """What follows, in sentences that the numbers choose."""
    free = ("none",)
    lines = []
    for size in SIZES:
        (of_balanced, where), (of_free, free_where) = (
            worst(result, ways, size) for ways in (WAYS_BALANCED, free)
        )
        even = max(result["even"][size][p]["worst"] for p in ("4", "8", "16"))
        lines.append(
            f"- Micro-batches of {size} tokens: the busiest device is at most {of_balanced:.2f} "
            f"with a way to balance ({where}), {of_free:.2f} without ({free_where}), {even:.2f} if "
            f"experts are drawn evenly. That is {'under' if of_balanced < BAR else 'over'} the bar "
            f"of {BAR} with a way to balance."
        )
    for way, one in result["ways"].items():
        steps = [f"{by['4k']['8']['median']:.2f}" for by in one["steps"].values()]
        lines.append(
            f"- The busiest of 8 devices at steps {', '.join(one['steps'])} ({way}, 4k tokens): "
            f"{', '.join(steps)}."
        )
    for way in result["ways"]:
        lines += [copied(result, way), by_age(result, way)]
    lines.append(f"- {lina(result)}")
    return [*lines, LIMITS]


TEXTS = {
    sizes: (
        "By size of a micro-batch",
        "The busiest expert and the busiest device over the mean, experts placed in order: median "
        "of the layers / the worst layer, each a median over micro-batches. The last step, "
        "held-out text of the kind of training, rows drawn as training draws them. "
        "Even draws: experts of each token drawn evenly, which is what chance alone makes.",
    ),
    over_steps: ("Over training", "The busiest of 8 devices, micro-batches of 4k tokens."),
    by_layer: ("By layer", "The same at the last step, medians over micro-batches."),
    on_texts: (
        "On other texts",
        "The same. As it stands: rows of a file follow one another, as in serving.",
    ),
    lasting: (
        "How long hot experts stay hot",
        "Of the hottest eighth of a layer's experts, the share that is among the hottest again "
        "(chance: 12 %): in another micro-batch of 4k tokens, so many apart, or at the next "
        "recorded step on the same text. Here the worst is the least.",
    ),
    foretold: (
        "What foretells the next layer",
        "A path is the likeliest expert of each of the last layers. Counts are learned on one half "
        "of the files and tested on the other, for the layers with six before them. Each cell: how "
        "often the likeliest is among the token's experts, and the share of a token's experts that "
        "are among as many foretold. A path that was not seen, or not 8 times, gives way to the "
        "next shorter one; the last column is how many tokens had theirs, by way.",
    ),
}
PLACED = (
    "The busiest device over the mean, by formula: eight micro-batches of 4k tokens (four of "
    "other texts), medians over layers. Slots: a device holds so many copies, slot j of device p "
    "of an expert of device p + j + 1, the hottest by load over holders; a linear program splits "
    "its rows. Three tables each: made from the micro-batch itself, from the four before it, and "
    "from the recorded step before the last, on the kind of text of training. Slots have two "
    "more: copies by the four before and by the step before, rows split by the counts of the "
    "micro-batch itself."
)
SIZES = ("1k", "4k", "16k")
LIMITS = (
    "- Not shown: how even large models are after long training. These are small, have seen little "
    "text, and read bytes; the tables by step say whether loads still changed when they ended."
)


def page(result: dict[str, Any], doc: str) -> str:
    """The results as Markdown."""
    setup = result["setup"]
    lines = ["# How unevenly tokens fall on experts", "", *doc.strip().splitlines()]
    lines += ["", "## What follows", "", *follows(result), "", "## The models", ""]
    lines += [*models(result, setup)]
    for part, (title, text) in TEXTS.items():
        lines += ["", f"## {title}", "", text, "", *part(result)]
    lines += ["", "## Other placements and copies", "", PLACED]
    for kind in next(iter(result["ways"].values()))["placed"]:
        name = {"own": "held-out text of the kind of training"}.get(kind, kind)
        lines += ["", f"{name[0].upper()}{name[1:]}:", "", *placements(result, kind)]
    machine = json.dumps(result["machine"])
    stamp = f"JAX {result['jax']}, Python {result['python']}, {result['date']}."
    return "\n".join([*lines, "", f"{stamp} Machine: {machine}", ""])


def models(result: dict[str, Any], setup: dict[str, Any]) -> list[str]:
    """The models, and how well they learned."""
    keys = list(next(iter(result["ways"].values()))["bits"])
    names = [f"step {key}" if key.isdigit() else key for key in keys]
    rows = [
        [way, *(f"{one['bits'][key]:.2f}" for key in keys)] for way, one in result["ways"].items()
    ]
    tokens, given = setup["batch"] * setup["length"], result["coefficients"]
    text = (
        f"{setup['layers']} layers of width {setup['width']}, {setup['experts']} experts of "
        f"hidden width {setup['hidden']}, {setup['choices']} a token, in {setup['steps']} steps of "
        f"{tokens:,} tokens, one seed. The balance loss has moejax's default coefficient, "
        f"{given['balance loss']:g} as a mean over layers. The selection bias moves "
        f"{given['bias']:g} a step; the loss of a sequence is {given['sequence loss']:g} a layer, "
        "as DeepSeek-V3's. Scores are sigmoids where there is a bias, else a softmax. At the last "
        "step the model was exported to files of `transformers` and imported again: all that is "
        "said of other texts is of an imported model. Bits per byte on the recorded rows:"
    )
    if absent := [way for way in WAYS_BALANCED if way not in result["ways"]]:
        text = f"This record was made without: {', '.join(absent)} (`--ways`). {text}"
    return [text, "", *table(["balanced by", *names], rows)]
