"""The pages of plans made for the papers' models and for every known cluster."""

from typing import Any

from moejax.plan.search.space import RULES


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
            name = row["baseline_name"]
            lines.append(f"- {name[0].upper()}{name[1:]}: {row['baseline']}.")
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
        "A rule of thumb's column is its time over the plan's; empty: it does not fit, or is "
        "another rule's mesh. " + " ".join(f"{name}: {said}." for name, said in RULES.items()),
        "",
        f"| cluster | devices | plan | ms a step | GiB | tokens/s | {' | '.join(RULES)} "
        "| search (s) |",
        f"|---|---:|---|---:|---:|---:|{'---:|' * len(RULES)}---:|",
    ]
    for row in rows:
        if "refused" in row:
            empty = "| " * (len(RULES) + 4)
            lines.append(f"| {row['cluster']} | {row['devices']} | {row['refused']} {empty}|")
            continue
        rules = (f"{row['rules'][name]:.2f}" if name in row["rules"] else "" for name in RULES)
        lines.append(
            f"| {row['cluster']} | {row['devices']} | {row['plan']} | {row['milliseconds']:,.0f} | "
            f"{row['gib']:.0f} | {row['tokens_a_second']:,.0f} | {' | '.join(rules)} | "
            f"{row['search_seconds']:.0f} |"
        )
    return "\n".join([*lines, ""])
