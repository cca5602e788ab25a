"""TRL's GRPOTrainer in a race: the same warm policy, tasks, tool, reward and optimiser as ours.

    Race("calculator", "trl", (), 0, 600, Budget(9600)) -> Result, as `races.trained` makes of ours

What is the same: weights before the first step, chat template, token budget of a turn, turns of an
episode, temperature, tasks an iteration, group size, loss (sequence mean of clipped token ratios,
advantages over their standard deviation), AdamW with its rates and warm-up, held-out tasks and how
they are measured (in our own sampler, with TRL's weights). Attention is torch's, and everything of
TRL that is not training (logging, saving, its progress bar) is off.

What is not: the order of training tasks is TRL's, its parser takes a malformed call for a final
answer, and its budget of an episode counts tool results too (`COMPLETION` leaves room for them).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

from fastturn import trainer
from fastturn.config import Config
from fastturn.envs.base import Task
from fastturn.envs.calculator import grade, one_operation
from fastturn.envs.tools import ToolError
from fastturn.run import Run

from .races import Point, Race, Result, point

COMPLETION = 192  # tokens of an episode behind its prompt, tool results included
TEMPLATE = (  # the quickstart's prompts name no tools, so tools= renders nothing
    "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' + message.content -}}"
    "{%- for call in message.tool_calls or [] -%}{{- '<tool_call>{\"name\": ' + call.function.name "
    "| tojson + ', \"arguments\": ' + call.function.arguments | tojson + '}</tool_call>' -}}"
    "{%- endfor -%}{{- '<|im_end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def calculator(expression: str) -> str:
    """Does one operation (+ - * /) on two numbers.

    Args:
        expression: for example 37*12

    Returns:
        The result.
    """
    try:
        return one_operation(expression)
    except ToolError:
        return "error"


def rewarded(end: int) -> Callable[..., list[float]]:
    """1 for an episode whose last message boxes the answer and whose every message, ours and the
    tool's, ends with the token `end`: an action cut by its budget ends an episode with nothing."""

    def reward(
        completions: list[Any], completion_ids: list[list[int]], answer: list[int], **_: Any
    ) -> list[float]:
        episodes = zip(completions, completion_ids, answer, strict=True)
        return [
            float(ids.count(end) == len(messages))
            * grade(Task("task", {"answer": right}), messages[-1].get("content") or "").reward
            for messages, ids, right in episodes
        ]

    return reward


def arguments(config: Config, folder: Path) -> Any:
    """`GRPOConfig` of what `config` says."""
    from trl import GRPOConfig

    loss, optim, batch = config.loss, config.optim, config.tasks * config.group_size
    return GRPOConfig(
        output_dir=str(folder),  # nothing is written
        use_cpu=True,
        bf16=False,
        seed=config.seed,
        max_steps=config.iterations,
        per_device_train_batch_size=batch,
        num_generations=config.group_size,
        max_completion_length=COMPLETION,
        max_tool_calling_iterations=config.turns - 1,
        generation_kwargs={"max_new_tokens": config.sampling.turn_tokens},
        temperature=config.sampling.temperature,
        top_k=0,
        loss_type="grpo",
        scale_rewards="group" if loss.normalize_std else "none",
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        beta=loss.kl_coef,
        learning_rate=optim.lr,
        adam_beta2=optim.beta2,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.clip_norm,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=optim.warmup_steps,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


class Measuring(TrainerCallback):
    """Counts CPU seconds of TRL's steps and, when an evaluation is due, measures success outside
    of them; ends the training when the budget is spent."""

    def __init__(self, race: Race, evaluate: Callable[[int, float], Point], batch: int) -> None:
        self.race, self.evaluate, self.batch = race, evaluate, batch
        self.curve = [evaluate(0, 0.0)]
        self.spent_s, self.rollouts = 0.0, 0
        self._since_s = time.process_time()

    def on_train_begin(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        self._since_s = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **ignored: Any) -> None:
        self.spent_s += time.process_time() - self._since_s
        self.rollouts = state.global_step * self.batch
        budget = self.race.budget
        share = budget.spent(self.rollouts, self.spent_s)
        if share >= min(1, len(self.curve) / budget.evaluations):
            self.curve.append(self.evaluate(self.rollouts, self.spent_s))
        control.should_training_stop = share >= 1
        self._since_s = time.process_time()


def trained(run: Run, race: Race) -> Result:
    """What `races.trained` does, by TRL. `ValueError` for a task that its tool does not fit."""
    from datasets import Dataset
    from trl import GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    if race.task != "calculator":
        raise ValueError(f"task {race.task}: TRL runs here with the calculator; choose calculator")
    config = run.config
    shape = copy.deepcopy(run.policy.model.config)  # ours keeps its own attention
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    model.load_state_dict(run.policy.model.state_dict())
    tokenizer = copy.deepcopy(run.tokenizer)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    calls: dict[str, float] = {}

    def evaluate(rollouts: int, seconds: float) -> Point:
        run.policy.model.load_state_dict(model.state_dict())
        run.cursor.version += 1
        found = trainer.held_out(run, "during")
        calls.update({"tool calls": found.tool_calls_mean, "turns": found.turns_mean})
        return point(rollouts, seconds, found)

    batch = config.tasks * config.group_size
    tasks = list(run.domain.train_tasks[: race.budget.rollouts // config.group_size])
    prompts = [run.domain.env().start(task) for task in tasks]
    answers = [task.data["answer"] for task in tasks]
    measuring = Measuring(race, evaluate, batch)
    training = GRPOTrainer(
        model=model,
        reward_funcs=rewarded(tokenizer.eos_token_id),
        args=arguments(config, run.out),
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": answers}),
        processing_class=tokenizer,
        tools=[calculator],
        callbacks=[measuring],
    )
    training.remove_callback(PrinterCallback)
    training.train()
    found = metrics(training.state.log_history[-1], measuring, batch)
    return Result(race, tuple(measuring.curve), calls | found)


def metrics(seen: Mapping[str, float], measuring: Measuring, batch: int) -> dict[str, float]:
    """What TRL counted over all steps, under the names of `races.metrics`."""
    rollouts, seconds = measuring.rollouts, measuring.spent_s
    return {
        "s / 1000 rollouts": 1000 * seconds / rollouts,
        "s / iteration": seconds * batch / rollouts,
        "zero advantage": seen["frac_reward_zero_std"],
        "tokens / success": seen["completions/mean_length"] / max(seen["reward"], 1 / rollouts),
        "truncated": seen["completions/clipped_ratio"],
        "iterations": rollouts / batch,
    }
