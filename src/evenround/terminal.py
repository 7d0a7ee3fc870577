"""What a run looks like on a terminal: the table of schemes, a progress bar with block, loss and time left, one line a finished block."""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from evenround.job import Silent
from evenround.model import Site
from evenround.plan import Plan
from evenround.plan_report import render_plan
from evenround.record import BlockRecord
from evenround.scheme import Scheme


class Notes(Silent):
    """Says notes and nothing else."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, highlight=False)


class TerminalProgress:
    """The `Progress` of `pipeline.run`, drawn by rich on `console` (stderr). Without a terminal only the finished lines are printed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("reading", total=None, loss="")
        self._steps = 0

    def __enter__(self) -> "TerminalProgress":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def schemes(self, sites: Sequence[Site], schemes: Mapping[str, Scheme | None]) -> None:
        """One line for each kind of layer that is treated alike."""
        table = Table(title="schemes", title_justify="left")
        for column in ("layers", "shape [out, in]", "scheme", "count"):
            table.add_column(column, overflow="fold")
        kinds = Counter((_kind(site), site.shape, _label(schemes[site.name])) for site in sites)
        for (kind, shape, label), count in kinds.items():
            table.add_row(kind, f"{shape[0]} x {shape[1]}", label, str(count))
        self._console.print(table)

    def plan(self, plan: Plan) -> None:
        """One line a device."""
        self._console.print(*render_plan(plan), sep="\n")

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, highlight=False)

    def group_started(self, number: int, count: int, names: Sequence[str]) -> None:
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1].rsplit('.', 1)[-1]}"
        self._steps = self._steps or 1
        self._bar.update(
            self._task, description=f"{label} ({number + 1}/{count})", total=count * self._steps, completed=number * self._steps
        )

    def step(self, iteration: int, iters: int, loss: float) -> None:
        task = self._bar.tasks[0]
        if self._steps != iters:
            groups = (task.total or 1) / self._steps
            self._bar.update(self._task, total=groups * iters, completed=task.completed / self._steps * iters)
            self._steps = iters
        self._bar.update(self._task, advance=1, loss=f"loss {loss:.3g}")

    def group_done(self, number: int, count: int, record: BlockRecord) -> None:
        label = record.blocks[0] if len(record.blocks) == 1 else f"{record.blocks[0]} … {record.blocks[-1].rsplit('.', 1)[-1]}"
        what = "loss of what came before" if record.kept == "float" else "rtn loss"
        losses = "" if record.rtn_loss is None else f"  {what} {record.rtn_loss:.3g}"
        if record.tuned_loss is not None:
            losses += f", tuned {record.tuned_loss:.3g}"
        seconds = sum(record.seconds.values())
        self._console.print(f"{label} ({number + 1}/{count})  {record.kept}{losses}  {seconds:.1f} s", markup=False, highlight=False)


def _kind(site: Site) -> str:
    """The name with its block number taken out: sites of the same kind share a line."""
    return site.name if site.block is None else site.name.replace(f".{site.block}.", ".*.", 1)


def _label(scheme: Scheme | None) -> str:
    return "floating point" if scheme is None else scheme.label
