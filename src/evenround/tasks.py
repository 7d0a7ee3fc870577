"""lm-eval's tasks on a checkpoint of ours: an optional extra, and the only place that knows lm-eval."""

from pathlib import Path
from typing import Any

import torch

from evenround.errors import UserError, nearest
from evenround.loading import load_model
from evenround.memory.devices import parse_devices
from evenround.memory.stage import spread, stage
from evenround.model import find_blocks


def check_tasks(tasks: list[str]) -> Any:
    """lm-eval's task manager, which knows all of `tasks`: to be asked before hours of work, not after.

    Raises `UserError` when lm-eval is not installed, or for a task that it does not know.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(f"--tasks needs lm-eval ({error}): pip install 'lm-eval>=0.4.13'") from error
    files = [task for task in tasks if Path(task).suffix in (".yaml", ".yml")]
    for task in files:
        if not Path(task).is_file():
            raise UserError(f"--tasks {task}: there is no such file")
    manager = TaskManager(include_defaults=len(files) < len(tasks))
    for task in tasks:
        if task not in files and task not in manager.all_tasks:
            raise UserError(f"lm-eval has no task {task!r} (--tasks){nearest(task, manager.all_tasks)}; `lm_eval ls tasks` lists them")
    return manager


def run_tasks(
    checkpoint: Path,
    tasks: list[str],
    batch_size: int = 8,
    limit: int | None = None,
    num_fewshot: int | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> dict[str, dict[str, Any]]:
    """lm-eval's results for `tasks` (its names, or YAML files of tasks): `{task: {metric: value}}`, metrics as lm-eval spells them.

    The model is loaded by `load_model`, in float32. `limit`: samples per task. Raises `UserError` when lm-eval is not installed, for an
    unknown task, for data that cannot be had, and for a checkpoint that cannot be loaded.
    """
    manager = check_tasks(tasks)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = load_model(checkpoint, torch.float32, trust_remote_code)
    if tokenizer is None:
        raise UserError(f"{checkpoint} has no tokenizer files; copy the original's there")
    try:
        with stage(parse_devices(device)) as devices, spread(model, find_blocks(model), devices.where):
            lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
            found = simple_evaluate(
                lm, tasks=tasks, num_fewshot=num_fewshot, limit=limit, task_manager=manager, bootstrap_iters=1000, log_samples=False
            )
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"--tasks {','.join(tasks)}: {reason}; check the task and that its data can be downloaded or is here") from error
    return {task: {key: value for key, value in metrics.items() if key != "alias"} for task, metrics in found["results"].items()}
