"""The pages of plans made for the papers' models and for every known cluster."""

from typing import Any


def page(record: dict[str, Any], intro: str) -> str:
    """The papers' page, below an introduction."""
    lines = ["# The papers' questions, planned", "", *intro.strip().splitlines(), ""]
    lines += [f"JAX {record['jax']}, {record['date']}.", ""]
    for row in record["questions"]:
        lines += [f"## {row['question']}", "", f"Cluster `{row['cluster']}`.", ""]
        lines += [f"- The paper, its hardware: {row['claim']}."]
        lines += [
            f"- Predicted: {value:.2f} x ({name})." for name, value in row["predicted"].items()
        ]
        lines += [
            f"- Chosen: {row['plan']}; {row['seconds'] * 1e3:,.1f} ms, {row['gib']:.1f} GiB.",
        ]
        if row["baseline"] != "none":
            lines.append(f"- {row['baseline_name'].capitalize()}: {row['baseline']}.")
        lines += [f"- Why: {row['why']}."] if row["why"] else []
        lines += [f"- What differs: {row['differs']}."]
        lines += [f"- Priced {row['date']}."] if "date" in row else []
        lines.append("")
    lines += ["## The bound on splitting tokens over tensor ranks", ""]
    lines += ["| cluster | tensor | all-to-all alone | with the gather | overlapped |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for row in record["bounds"]:
        alone, after, beside = row["ratios"]
        lines.append(
            f"| {row['cluster']} | {row['tensor']} | {alone:.2f} | {after:.2f} | {beside:.2f} |"
        )
    lines += ["", "MoNTA (paper, its hardware): 8 x at tensor 8. That is the first column.", ""]
    lines += [
        "## Tokens that do not fall evenly",
        "",
        "OLMoE-1B-7B, 16 sequences of 4,096 tokens, dropless. Busiest: the rows of the busiest",
        "expert over the mean. The last column is the plan of the cluster's first row, priced for",
        "the routing of its own row. With 512 sequences every row is planned without an expert",
        "axis, and then it does not matter where tokens go.",
        "",
        "| cluster | routing | busiest | plan | ms a step | the even plan there |",
        "|---|---|---:|---|---:|---:|",
    ]
    for row in record["routings"]:
        fits = "" if row["even_plan_fits"] else ", does not fit"
        lines.append(
            f"| {row['cluster']} | {row['routing']} | {row['busiest']:.1f} | {row['plan']} | "
            f"{row['seconds'] * 1e3:,.0f} | {row['even_plan_seconds'] * 1e3:,.0f}{fits} |"
        )
    return "\n".join([*lines, ""])


def clusters_page(rows: list[dict[str, Any]], made: dict[str, Any]) -> str:
    """The clusters' page."""
    lines = [
        "# One model, planned for every known cluster",
        "",
        "OLMoE-1B-7B (6.9 B parameters), 512 sequences of 4,096 tokens a step (504 on 72 devices),",
        "bfloat16, no codecs. Nothing ran. "
        "`python -m benchmarks.papers.plans --out benchmarks/results`, "
        f"JAX {made['jax']}, {made['date']}.",
        "Default: experts over all devices, flat exchange. Simple: the faster of FSDP over all "
        "devices, and experts inside a node with FSDP across.",
        "",
        "| cluster | devices | plan | ms a step | GiB | tokens/s | default / chosen | "
        "simple / chosen | search (s) |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        if "refused" in row:
            lines.append(f"| {row['cluster']} | {row['devices']} | {row['refused']} | | | | | | |")
            continue
        over, simple = (
            "" if row[name] is None else f"{row[name]:.2f}"
            for name in ("over_default", "over_simple")
        )
        lines.append(
            f"| {row['cluster']} | {row['devices']} | {row['plan']} | {row['milliseconds']:,.0f} | "
            f"{row['gib']:.0f} | {row['tokens_a_second']:,.0f} | {over} | {simple} | "
            f"{row['search_seconds']:.0f} |"
        )
    return "\n".join([*lines, ""])
