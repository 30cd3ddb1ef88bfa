"""The analyses as aligned text, Markdown and LaTeX: one table type, three renderings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from fit.analysis import Analysis, Unidentified
from fit.compare import PARTS, Comparison
from fit.consequences import Equivalent, Optimum
from fit.diagnose import Diagnosis
from fit.minima import Minimum
from fit.sensitivity import LawRow
from fit.uncertainty import Interval


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table of text cells."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def text(self) -> str:
        widths = [max(len(line[i]) for line in (self.header, *self.rows)) for i in range(len(self.header))]
        lines = [self.title]
        for line in (self.header, *self.rows):
            lines.append(
                "  " + "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
            )
        return "\n".join(lines + ([f"  {self.note}"] if self.note else []))

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _bar(self.header), _bar(["---"] * len(self.header))]
        lines += [_bar([cell.replace("|", "\\|") for cell in row]) for row in self.rows]
        return "\n".join(lines + (["", self.note] if self.note else [])) + "\n"

    def latex(self) -> str:
        """A `table` in booktabs style; needs `\\usepackage{booktabs}`."""
        body = [" & ".join(map(_tex, row)) + r" \\" for row in self.rows]
        lines = [
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{_tex(self.title)}{'. ' + _tex(self.note) if self.note else ''}}}",
            f"  \\begin{{tabular}}{{l{'r' * (len(self.header) - 1)}}}",
            r"    \toprule",
            "    " + " & ".join(map(_tex, self.header)) + r" \\",
            r"    \midrule",
            *("    " + line for line in body),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "φ": r"$\varphi$", "α": r"$\alpha$", "β": r"$\beta$",
    "ψ": r"$\psi$", "ε": r"$\varepsilon$", "δ": r"$\delta$", "Δ": r"$\Delta$", "−": "$-$", "·": r"$\cdot$",
    "×": r"$\times$", "²": "$^2$", "₂": "$_2$", "∞": r"$\infty$", "…": r"\dots{}", "–": "--", "Σ": r"$\Sigma$",
}  # fmt: skip


def _tex(text: str) -> str:
    text = text.replace("r^φ", "\0").replace("r^ψ", "\1")
    for name in ("-α", "−α", "-β", "−β"):
        text = text.replace("^" + name, {"α": "\2", "β": "\3"}[name[-1]])
    out = "".join(_TEX.get(c, c) for c in text)
    for mark, tex in (
        ("\0", r"$r^\varphi$"),
        ("\1", r"$r^\psi$"),
        ("\2", r"$^{-\alpha}$"),
        ("\3", r"$^{-\beta}$"),
    ):
        out = out.replace(mark, tex)
    return out


def _bar(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def span(interval: Interval | tuple[float, float] | None, form: str = ".3f") -> str:
    if interval is None:
        return "–"
    low, high = (interval.low, interval.high) if isinstance(interval, Interval) else interval
    return f"{_plain(low, form)} to {_plain(high, form)}"


def _plain(value: float | None, form: str) -> str:
    """A number; – where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:{form}}" if math.isfinite(value) else "∞" if value > 0 else "−∞"


def mnat(value: float | None, form: str = ".1f") -> str:
    return _plain(None if value is None else 1000 * value, form)


def count(value: float | None) -> str:
    """A number of parameters or tokens: 589 M."""
    if value is None or not math.isfinite(value):
        return _plain(value, "")
    for size, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= 0.9995 * size:  # 999.7 M rounds to 1 B
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _flops(budget: float) -> str:
    return f"{budget:.3g}" if math.isfinite(budget) else "–"


def fits_table(analysis: Analysis) -> Table:
    """One row an arm: φ, its interval and the law's parameters."""
    rows = []
    for a in analysis.arms.values():
        if isinstance(a, Unidentified):
            rows.append((a.arm, "not identified", *["–"] * 6, "–", str(len(a.index))))
            continue
        p = a.fit.parameters
        named = [f"{p[n]:.4g}" for n in ("E", "A", "alpha", "B", "beta")]
        rows.append(
            (a.arm, f"{a.phi:.3f}", span(a.interval), *named, f"{a.fit.r_squared:.4f}", str(len(a.index)))
        )
    o = analysis.options
    note = (
        f"{o.level:.0%} intervals from {o.resamples} resamples of {o.unit}s; convention {analysis.losses.convention};"
        f" {o.baseline} baseline; {o.objective}."
    )
    return Table(
        "Joint law by arm", ("arm", "φ", "interval", "E", "A", "α", "B", "β", "R²", "rows"), tuple(rows), note
    )


def differences_table(analysis_differences, level: float) -> Table:
    rows = [
        (f"{d.arm} − {d.against}", f"{d.estimate:+.3f}", span(d.interval, "+.3f"))
        for d in analysis_differences
    ]
    return Table(
        "Differences of φ",
        ("arms", "Δφ", f"{level:.0%} interval"),
        tuple(rows),
        "r = 1 cells resampled together.",
    )


def laws_table(arm: str, laws: Sequence[LawRow]) -> Table:
    rows = []
    for law in laws:
        rows.append(
            (
                law.law.name + ("" if law.status == "converged" else f" ({law.status})"),
                _plain(law.phi, ".3f"),
                span(law.interval),
                mnat(law.misfit),
                mnat(law.left_out),
                mnat(law.extrapolated),
            )
        )
    known = [law for law in laws if law.left_out is not None]
    note = "Misfit and errors in mnat (rmse); cell = budget × r; upper = the upper third of the budgets from the lower."
    if known:
        best = min(known, key=lambda law: law.left_out or 0.0)
        note += f" The least error on cells left out: {best.law.name}."
    if any(law.law.name.startswith("floor") for law in laws):
        note += " φ leans on the floor E being shared by all r: see the row that frees it."
    header = ("law", "φ", "interval", "misfit", "cell left out", "upper predicted")
    return Table(f"{arm}: φ under neighbouring laws", header, tuple(rows), note)


def diagnosis_tables(d: Diagnosis) -> list[Table]:
    fit = d.lack_of_fit
    named = ((fit.rows_p, "rows independent"), (fit.cells_p, "cells resampled"))
    tests = [f"p = {p:.2g} with {name}" for p, name in named if p is not None]
    told = f"r^φ against m(r): {', '.join(tests)}. " if tests else ""
    free = tuple(
        (str(m.recurrences), _plain(m.free, ".3f"), span(m.interval), _plain(m.power, ".3f"))
        for m in fit.multipliers
    )
    parts = tuple(
        (
            s.name,
            str(s.rows),
            _plain(s.phi, ".3f"),
            span(s.interval) if s.interval else s.reason,
        )
        for s in d.subsets
    )
    cells = tuple(
        (str(i.recurrences), _flops(i.budget_flops), _plain(i.change, "+.4f")) for i in d.influence[:6]
    )
    misfit = tuple((m.name, str(m.rows), f"{m.mean_log:+.4f}", mnat(m.rmse)) for m in d.misfit)
    return [
        Table(
            f"{d.arm}: worth of r passes", ("r", "m(r)", "interval", "r^φ"), free,
            f"{told}Misfit with m(r) {mnat(fit.misfit)} mnat.",
        ),
        Table(f"{d.arm}: φ from parts of the rows", ("part", "rows", "φ", "interval"), parts),
        Table(f"{d.arm}: cells that move φ most", ("r", "budget", "φ without it − φ"), cells),
        Table(f"{d.arm}: misfit", ("rows with", "rows", "mean log residual", "rmse, mnat"), misfit),
        Table(f"{d.arm}: profile likelihood", ("", "interval"), (("φ", span(d.profile.interval)),),
              "Rows taken as independent: narrower than the resampled cells where cells err together."),
    ]  # fmt: skip


def comparison_tables(c: Comparison) -> list[Table]:
    rows = []
    for view in c.views:
        for d in view.differences:
            phi = ", ".join(f"{n} {v:.3f}" for n, v in view.phi.items())
            gap = (f"{d.arm} − {d.against}", f"{d.estimate:+.3f}", span(d.interval, "+.3f"))
            rows.append((view.shares, phi, *gap, mnat(view.misfit)))
        if not view.differences:
            shared = f"all {next(iter(view.phi.values())):.3f}"
            rows.append((view.shares, shared, "–", "–", "–", mnat(view.misfit)))
    views = Table(
        "φ of the arms", ("arms share", "φ", "difference", "Δφ", "interval", "misfit, mnat"), tuple(rows)
    )
    lines = []
    for s in c.splits:
        parts = [
            f"{mnat(s.parts[p], '+.1f')} ({mnat(s.intervals[p].low, '+.0f')}, {mnat(s.intervals[p].high, '+.0f')})"
            for p in PARTS
        ]
        name = "all" if s.recurrences is None else str(s.recurrences)
        lines.append(
            (
                f"{s.arm} − {s.against}",
                name,
                str(s.pairs),
                mnat(s.observed, "+.1f"),
                mnat(s.fitted, "+.1f"),
                *parts,
            )
        )
    note = (
        "loop: φ, the worth of a recurrence itself; tokens: what equal FLOPs buy, the training-side gain; recipe: E, A,"
        " B, α, β. Negative is better. Averages over the orders of exchange; the parts add up to the fitted difference."
    )
    header = ("arms", "r", "pairs", "observed", "fitted", *PARTS)
    return [views, Table("Loss difference at equal compute, mnat", header, tuple(lines), note)]


def equivalent_table(items: Sequence[Equivalent]) -> Table:
    rows = tuple(
        (e.arm, str(e.recurrences), "–" if e.d_model is None else str(e.d_model), count(e.unique), count(e.equal_loss),
         f"{count(e.equal_loss_interval.low)} to {count(e.equal_loss_interval.high)}", count(e.equal_cost),
         _plain(e.loss, ".4f"), _plain(e.loss_at_equal_cost, ".4f"))
        for e in items
    )  # fmt: skip
    header = (
        "arm",
        "r",
        "width",
        "unique",
        "equal loss",
        "interval",
        "equal cost",
        "loss",
        "loss at equal cost",
    )
    return Table("Unshared models that equal a looped one, in parameters", header, rows)


def optima_table(items: Sequence[Optimum]) -> Table:
    rows = tuple(
        (o.arm, str(o.recurrences), f"{o.budget_flops:.3g}", count(o.n_optimal),
         f"{count(o.n_interval.low)} to {count(o.n_interval.high)}", count(o.tokens), _plain(o.loss, ".4f"),
         span(o.loss_interval, ".4f"), "extrapolated" if o.extrapolated else "")
        for o in items
    )  # fmt: skip
    header = ("arm", "r", "budget", "N*", "interval", "tokens", "loss", "interval", "")
    return Table("Compute-optimal models under the law (N = n_once + n_rec)", header, rows)


def minima_table(items: Sequence[Minimum]) -> Table:
    rows = tuple(
        (m.arm, str(m.recurrences), f"{m.budget_flops:.3g}", count(m.n_optimal),
         "–" if m.interval is None else f"{count(m.interval[0])} to {count(m.interval[1])}",
         "–" if m.loss is None else f"{m.loss:.5f}", str(m.runs), m.note)
        for m in items
    )  # fmt: skip
    header = ("arm", "r", "budget", "N*", "interval", "loss", "runs", "")
    return Table("Iso-FLOP minima: parabolas in log N (N = n_once + n_rec)", header, rows)
