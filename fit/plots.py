"""Pictures of a fit, drawn without a display."""

from __future__ import annotations

import io
import warnings
from statistics import NormalDist

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fit.analysis import Analysis, ArmFit, Unidentified
from fit.diagnose import Diagnosis
from fit.law import Rows
from fit.losses import Losses
from fit.solve import predict
from fit.words import count
from looped.text import one_line

_CATEGORIES = ("#2a78d6", "#d97b0d", "#2f9e63", "#b0479b", "#7a6a58", "#c23b3b")
_SEQUENTIAL = (
    "#86b6ef",
    "#6da7ec",
    "#5598e7",
    "#3987e5",
    "#2a78d6",
    "#256abf",
    "#1c5cab",
    "#184f95",
    "#104281",
    "#0d366b",
)

_MOST_PANELS = 12  # along one side: a picture has at most 65,536 pixels there, and no reader for more


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        # Of an arm's name; shown as a box.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _figure(rows: int, columns: int, width: float = 3.2, height: float = 2.9, **kwargs):
    figure = Figure(
        figsize=(max(width * columns, 4.5), height * rows + 0.4), layout="constrained", facecolor="white"
    )
    axes = figure.subplots(rows, columns, squeeze=False, **kwargs)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color="#e6e5e1", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
    return figure, axes


def _title(ax, text: str) -> None:
    """An arm's name is text and no mathematics, whatever dollar signs it has."""
    ax.set_title(one_line(text, 60), fontsize=9, parse_math=False)


def _plain_log_ticks(ax) -> None:
    """Few labels on a logarithmic axis, as 30 M: a sweep spans less than two decades."""
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: count(v).replace(" ", "\u202f")))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _shades(count: int) -> list[str]:
    return [_SEQUENTIAL[i] for i in np.linspace(0, len(_SEQUENTIAL) - 1, count).round().astype(int)]


def isoflops(analysis: Analysis) -> Figure:
    """Loss against parameters: a row of panels an arm, a panel an r, a colour a budget, the fitted law as lines.

    At most the first 12 arms and 12 values of r, which the picture then says.
    """
    losses = analysis.losses
    arms = list(analysis.arms.values())[:_MOST_PANELS]
    columns = np.unique(losses.recurrences)[:_MOST_PANELS]
    budgets = np.unique(losses.budget[np.isfinite(losses.budget)])
    levels = budgets if len(budgets) else np.array([np.nan])
    colours = _shades(len(levels))
    figure, axes = _figure(len(arms), len(columns), sharey="row")
    if len(arms) < len(analysis.arms) or columns[-1] < losses.recurrences.max():
        every = f"{len(analysis.arms)} arms and {len(np.unique(losses.recurrences))} values of r"
        figure.suptitle(f"the first {len(arms)} and {len(columns)} of {every}", fontsize=9)
    for line, arm in zip(axes, arms, strict=True):
        for ax, r in zip(line, columns, strict=True):
            rows = arm.index[losses.recurrences[arm.index] == r]
            for level, colour in zip(levels, colours, strict=True):
                at = rows if np.isnan(level) else rows[losses.budget[rows] == level]
                if len(at):
                    _cell(ax, losses, arm, at, colour, None if np.isnan(level) else f"{level:.3g}")
            ax.set_xscale("log")
            _plain_log_ticks(ax)
            _title(ax, f"{arm.arm}, r = {r}")
            ax.set_xlabel("unique parameters n_once + n_rec", fontsize=8)
        line[0].set_ylabel("loss, nats per token", fontsize=8)
    handles = {
        h.get_label(): h for ax in axes.flat for h in ax.get_lines() if not h.get_label().startswith("_")
    }
    if handles:
        ordered = sorted(handles, key=float)
        figure.legend(
            [handles[k] for k in ordered], ordered, loc="outside right center", title="training FLOPs",
            fontsize=8, title_fontsize=8, frameon=False,
        )  # fmt: skip
    return figure


def _cell(
    ax, losses: Losses, arm: ArmFit | Unidentified, at: np.ndarray, colour: str, label: str | None
) -> None:
    size = losses.n_once[at] + losses.n_rec[at]
    ax.plot(
        size,
        losses.loss[at],
        "o",
        color=colour,
        markersize=4.5,
        markeredgecolor="white",
        markeredgewidth=0.6,
        label=label,
    )
    if isinstance(arm, Unidentified) or label is None:
        return
    sizes, once, rec, tokens = along(losses, at)
    scale = arm.fit.scale
    rows = Rows(
        np.log(np.maximum(once / scale.parameters, 1e-300)),
        np.log(rec / scale.parameters),
        np.full(len(sizes), np.log(losses.recurrences[at[0]])),
        np.log(tokens / scale.tokens),
        np.zeros(len(sizes)),
        np.zeros(len(sizes), dtype=np.int32),
    )
    ax.plot(sizes, np.exp(predict(arm.fit.law, arm.fit.x, rows)), "-", color=colour, linewidth=1.6)


def along(losses: Losses, at: np.ndarray, points: int = 60):
    """Sizes between those of the runs `at` of one cell, with n_once, n_rec and tokens interpolated in logarithms."""
    size = losses.n_once[at] + losses.n_rec[at]
    order = np.argsort(size)
    known, first = np.unique(np.log(size[order]), return_index=True)
    pick = at[order][first]
    grid = np.linspace(known[0], known[-1], points) if len(known) > 1 else known
    share = np.interp(grid, known, losses.n_rec[pick] / (losses.n_once[pick] + losses.n_rec[pick]))
    tokens = np.exp(np.interp(grid, known, np.log(losses.tokens[pick])))
    sizes = np.exp(grid)
    return sizes, sizes * (1 - share), sizes * share, tokens


def _identified_axes(analysis: Analysis, width: float = 3.6):
    arms = analysis.identified[:_MOST_PANELS]
    figure, axes = _figure(1, len(arms), width, 3.1, sharey=True)
    return figure, list(zip(axes[0], arms, strict=True))


def residuals(analysis: Analysis) -> Figure:
    """Predicted − observed losses in mnat against parameters, a panel an arm, a colour an r."""
    losses = analysis.losses
    figure, panels = _identified_axes(analysis)
    for ax, arm in panels:
        r = losses.recurrences[arm.index]
        size = losses.n_once[arm.index] + losses.n_rec[arm.index]
        gap = 1000 * (arm.fit.predicted - losses.loss[arm.index])
        for value, colour in zip(np.unique(r), _CATEGORIES * 3, strict=False):
            at = r == value
            ax.plot(
                size[at],
                gap[at],
                "o",
                color=colour,
                markersize=4.5,
                markeredgecolor="white",
                label=f"r = {value}",
            )
        ax.axhline(0, color="#8a8984", linewidth=0.8)
        ax.set_xscale("log")
        _title(ax, arm.arm)
        ax.set_xlabel("unique parameters n_once + n_rec", fontsize=8)
        _plain_log_ticks(ax)
    panels[0][0].set_ylabel("predicted − observed loss, mnat", fontsize=8)
    panels[0][0].legend(fontsize=8, frameon=False)
    return figure


def profiles(analysis: Analysis, diagnoses: list[Diagnosis]) -> Figure:
    """Twice the drop in quasi log likelihood as φ is held, a panel an arm, with both intervals."""
    diagnoses = diagnoses[:_MOST_PANELS]
    figure, axes = _figure(1, len(diagnoses), 3.6, 3.1, sharey=True)
    arms = {a.arm: a for a in analysis.identified}
    limit = NormalDist().inv_cdf((1 + analysis.options.level) / 2) ** 2
    for ax, d in zip(axes[0], diagnoses, strict=True):
        ax.plot(d.profile.phi, d.profile.drop, "-", color=_CATEGORIES[0], linewidth=1.8)
        ax.axhline(limit, color="#8a8984", linewidth=0.8, linestyle="--")
        interval = arms[d.arm].interval
        ax.axvspan(interval.low, interval.high, color=_CATEGORIES[1], alpha=0.15, linewidth=0)
        ax.set_ylim(0, 4 * limit)
        _title(ax, f"{d.arm}: shaded, interval from resampled {analysis.options.unit}s")
        ax.set_xlabel("φ", fontsize=8)
    axes[0][0].set_ylabel("2 × drop in quasi log likelihood (rows independent)", fontsize=8)
    return figure


def multipliers(diagnoses: list[Diagnosis], analysis: Analysis) -> Figure:
    """Free multipliers m(r) with intervals beside r^φ, a panel an arm."""
    diagnoses = diagnoses[:_MOST_PANELS]
    figure, axes = _figure(1, len(diagnoses), 3.6, 3.1, sharey=True)
    arms = {a.arm: a for a in analysis.identified}
    for ax, d in zip(axes[0], diagnoses, strict=True):
        found = d.lack_of_fit.multipliers
        r = np.array([m.recurrences for m in found], dtype=float)
        free = np.array([m.free for m in found])
        bars = [free - [m.interval.low for m in found], np.array([m.interval.high for m in found]) - free]
        grid = np.geomspace(1, r.max(), 60)
        phi = arms[d.arm].phi
        ax.plot(grid, grid**phi, "-", color=_CATEGORIES[0], linewidth=1.8, label=f"$r^φ$, φ = {phi:.3f}")
        ax.errorbar(r, free, np.maximum(bars, 0), fmt="o", color=_CATEGORIES[1], capsize=3, label="free m(r)")
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, *r], [f"{v:g}" for v in (1, *r)])
        _title(ax, d.arm)
        ax.set_xlabel("recurrences r", fontsize=8)
        ax.legend(fontsize=8, frameon=False)
    axes[0][0].set_ylabel("worth of the recurrent block", fontsize=8)
    return figure
