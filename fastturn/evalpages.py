"""What an evaluation found, written down: eval.json, eval.md, eval.html.

The page has the measures and, for one model or two, what they did on the same tasks side by side;
tasks on which two models differ come first. It holds no script and needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fastturn.config import as_dict
from fastturn.evaluate import SETTINGS, Subject, Tried
from fastturn.excerpts import marked
from fastturn.provenance import commit, versions
from fastturn.records import write_json
from fastturn.types import Trajectory

SHOWN = 20  # tasks with transcripts

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>fastturn evaluation</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem;
  color: #1d2126; background: #f6f6f3; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: 3px 12px; border-bottom: 1px solid #e2e2dc; }
td { text-align: right; } th { text-align: left; font-weight: 500; overflow-wrap: anywhere; }
tr:first-child th, td { min-width: 11rem; }
.pair { display: grid; gap: 12px;
  grid-template-columns: repeat({{ models | length }}, minmax(0, 1fr)); }
.card { background: #fff; border: 1px solid #e2e2dc; border-radius: 8px; padding: 10px 14px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; margin: 4px 0; }
.said { background: #e3ecfa; padding: 4px 8px; }
.solved { color: #14804a; } .not { color: #c0392b; }
.call { color: #164a96; } .observation { color: #8a5a00; } .think { font-style: italic; }
.control, .role, .model { color: #8a919c; } .model { overflow-wrap: anywhere; }
</style></head><body>
<h1>Evaluation</h1>
<p>{{ domain }} · {{ tasks }} tasks · seed {{ seed }} · {{ commit }}</p>
<div class="wide"><table>
<tr><th>measure</th>{% for head in heads %}<th>{{ head }}</th>{% endfor %}</tr>
{% for name, cells in rows %}<tr><th>{{ name }}</th>
{% for cell in cells %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table></div>
<h2>Episodes ({{ setting }})</h2>
{% for name, columns in shown %}<h3>{{ name }}</h3><div class="pair">
{% for episode in columns %}<div class="card"><div class="model">{{ episode.model }}</div>
<b class="{{ 'solved' if episode.solved else 'not' }}">{{ episode.verdict }}</b>
{% for turn in episode.turns %}<pre>{{ turn.context }}</pre>
<pre class="said">{{ turn.action }}</pre>
{% endfor %}</div>{% endfor %}</div>{% endfor %}
</body></html>
"""


_SEVERAL = {"failures": "failed", "events": "event"}  # measures of several names


def rows(subjects: Sequence[Subject]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Heads (model and setting) and, for every measure that one of them has, its cells."""
    columns = [(subject, tried) for subject in subjects for tried in subject.tried]
    heads = [f"{subject.path} · {tried.setting}" for subject, tried in columns]
    names = dict.fromkeys(n for _, tried in columns for n in _flat(tried.measures))
    flat = [_flat(tried.measures) for _, tried in columns]
    return heads, [(name, [_cell(found.get(name)) for found in flat]) for name in names]


def _flat(measures: dict[str, Any]) -> dict[str, Any]:
    """Intervals beside their value, failures and events one by one."""
    found: dict[str, Any] = {}
    for name, value in measures.items():
        if name in _SEVERAL:
            found |= {f"{_SEVERAL[name]}: {one}": share for one, share in value.items()}
        elif not name.endswith("_interval"):
            around = measures.get(f"{name}_interval")
            found[name] = value if around is None else (value, *around)
    return found


def _cell(value: Any) -> str:
    if isinstance(value, tuple):
        return "{:.3f} [{:.3f}, {:.3f}]".format(*value)
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def markdown(subjects: Sequence[Subject]) -> str:
    """The table of all measures; brackets are 95 % bootstrap intervals over tasks."""
    heads, table = rows(subjects)
    lines = [f"| measure | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in table]
    return "\n".join(lines) + "\n"


def write(subjects: Sequence[Subject], out: Path) -> list[Path]:
    """Writes the three files into `out` and returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"eval.{kind}" for kind in ("json", "md", "html")]
    write_json(paths[0], _record(subjects))
    paths[1].write_text(markdown(subjects), encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    paths[2].write_text(environment.from_string(PAGE).render(_page(subjects)), encoding="utf-8")
    return paths


def _record(subjects: Sequence[Subject]) -> dict[str, Any]:
    return {
        "models": [
            {
                "path": str(subject.path),
                "config": as_dict(subject.config),
                "settings": {
                    tried.setting: {
                        "temperature": SETTINGS[tried.setting].temperature,
                        "top_p": SETTINGS[tried.setting].top_p,
                        **tried.measures,
                        "episodes": dict(_episodes(subject, tried)),
                    }
                    for tried in subject.tried
                },
            }
            for subject in subjects
        ],
        "versions": versions(),
        "commit": commit(),
    }


def _episodes(subject: Subject, tried: Tried) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Of every task its episodes: what was sampled (ids), how each ended and what it earned."""
    for task, episodes in zip(subject.tasks, tried.episodes, strict=True):
        told = [
            {
                "actions": [turn.completion.action_A.tolist() for turn in episode.turns],
                "events": [list(turn.events) for turn in episode.turns],
                "ending": str(episode.ending),
                "reward": episode.discounted_return(),
            }
            for episode in episodes
        ]
        yield task.id, told


def _page(subjects: Sequence[Subject]) -> dict[str, Any]:
    heads, table = rows(subjects)
    first = subjects[0]
    return {
        "models": subjects,
        "domain": first.config.data.domain,
        "tasks": len(first.tasks),
        "seed": first.config.seed,
        "commit": commit(),
        "heads": heads,
        "rows": table,
        "setting": first.tried[0].setting,
        "shown": _side_by_side(subjects),
    }


def _side_by_side(subjects: Sequence[Subject]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The first episode of each model under the first setting, of tasks that all of them tried."""
    tried = [dict(zip((t.id for t in s.tasks), s.tried[0].episodes, strict=True)) for s in subjects]
    common = [
        task.id for task in subjects[0].tasks if all(episodes.get(task.id) for episodes in tried)
    ]

    def agree(id: str) -> bool:
        return len({episodes[id][0].success for episodes in tried}) == 1

    return [
        (id, [_told(s, episodes[id][0]) for s, episodes in zip(subjects, tried, strict=True)])
        for id in sorted(common, key=agree)[:SHOWN]
    ]


def _told(subject: Subject, episode: Trajectory) -> dict[str, Any]:
    decode = subject.tokenizer.decode
    turns = [
        {
            "context": marked(decode(turn.boundary.context_T)),
            "action": marked(decode(turn.completion.action_A)),
        }
        for turn in episode.turns
    ]
    reward = episode.discounted_return()
    verdict = (
        f"{'solved' if episode.success else 'not solved'}, {episode.ending}, reward {reward:g}"
    )
    return {
        "model": str(subject.path),
        "solved": episode.success,
        "verdict": verdict,
        "turns": turns,
    }
