"""What a training run is asked to do: a YAML file, and `key=value` changes to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from fivefold.core.execution import MOST_MIB, DType, Execution, microbatches
from fivefold.core.experts import ExpertsConfig
from fivefold.core.layout import Layout
from fivefold.core.loss_scale import LossScaleConfig
from fivefold.core.optimizer import Integer, Name, Number, OptimizerConfig, Positive
from fivefold.core.recompute import RecomputeText
from fivefold.core.router import RouterConfig
from fivefold.core.value import Value, describe
from fivefold.core.workload import MOST_SEQUENCES, MOST_TOKENS, Workload
from fivefold.data.choice import DataSource
from fivefold.errors import ConfigError, LayoutError, nearest
from fivefold.strategies.pipeline.actions import read_actions
from fivefold.train.config_text import one_line, parse, read_file
from fivefold.train.sections import CheckpointConfig, LogConfig, PathName, ValidationConfig

COMMAND_LINE = "command line"

OPTIONS = ("device", "ranks", "port", "resume", "restarts")
"""What the command line takes as `--device cpu`, and no config as a key."""

AUTO_MICROBATCH_TOKENS = 8192
"""`micro_batch: auto` keeps a microbatch within so many tokens: large enough for full matmuls on a GPU."""

AUTO_MICROBATCHES_PER_STAGE = 4
"""`micro_batch: auto` under a pipeline: 4*pp microbatches keep the bubble (p-1)/(p-1+4p) below 1/5."""


def _rows_or_auto(value: object) -> object:
    """Checked before the union, whose own complaint would list the two types that it tried."""
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_SEQUENCES:
        return value
    if value == "auto":
        return value
    raise ValueError(f"expected an integer from 1 to {MOST_SEQUENCES}, or 'auto'")


MicroBatch = Annotated[int | Literal["auto"], BeforeValidator(_rows_or_auto)]

Data = Annotated[
    Annotated[Name, Tag("text")] | Annotated[tuple[DataSource, ...], Tag("source")],
    Discriminator(
        lambda value: {str: "text", list: "source", tuple: "source"}.get(type(value)),
        custom_error_type="data",
        custom_error_message="expected text, or a list of {path, weight}",
    ),
]
"""Told apart before they are checked, so that a fault is that of the one that was meant."""


class TrainConfig(Value):
    """A training run. Everything has a default but the model.

    Raises: LayoutError for a layout that cannot be formed, WorkloadError for a global batch that does not
    divide.
    """

    model: Name
    """A preset such as `tiny-llama`, or the path of a Hugging Face `config.json`."""
    layout: Layout = Layout()
    """How the job is cut, as text: `dp2 tp2 pp2:1f1b`."""
    measured: Name = "last"
    """Run whose stage times `ppN@measured` balances: its id, or `last`: the newest of this model."""
    seq_len: Annotated[Integer, Field(ge=2, le=MOST_TOKENS)] = 128
    """Tokens in a sample (one more is read, for the last label)."""
    global_batch: Annotated[Integer, Field(ge=1, le=MOST_SEQUENCES)] = 16
    """Samples in a step, over all ranks and microbatches."""
    micro_batch: MicroBatch = 1
    """Samples that one data rank computes at a time; `auto`: see `microbatch_rows`."""
    steps: Positive = 100
    """Optimizer steps in the run."""
    seed: Annotated[Integer, Field(ge=0, lt=2**63)] = 0
    """Of the initial weights and of the order of samples; neither depends on the layout."""
    dtype: DType = "float32"
    """Of parameters and of arithmetic."""
    weights: Name | None = None
    """Folder of a Hugging Face checkpoint to start from; null: random values from the seed."""
    export: Name | None = None
    """Folder for the trained model as a Hugging Face checkpoint; null: none is written."""
    data: Data = "builtin"
    """`builtin` (source code of this Python installation); a text file, folder or glob; a folder that
    `fivefold data prepare` made; or a mixture: a list of {path, weight}."""
    separate_documents: bool = False
    """Whether a token attends only to its own document, where several share a sample; false: to all before it."""
    data_limit_mib: Annotated[Number, Field(gt=0, le=MOST_MIB)] = 16.0
    """At most so many MiB of text are read; what lies beyond is left out."""
    bucket_mib: Annotated[Number, Field(gt=0, le=MOST_MIB)] = 25.0
    """Gradients are reduced over data ranks in buckets of about so many MiB."""
    zero3_gather: Literal["microbatch", "step"] = "microbatch"
    """ZeRO-3: gather parameters for each forward and backward, or once a step and keep them until its end."""
    recompute: RecomputeText = "none"
    """Activations that are computed again in backward rather than kept: `none`, `full`, or parts of a layer joined by +
    (`attention+mlp`); `full/2`: in every second layer."""
    actions: PathName | None = None
    """File with the actions of a `ppN:custom` layout, a line for each pipeline rank: `0F0, 0F1, 0B0, 0B1`."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient norm is NaN or infinite: stop and say where, or skip its update and count it."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """float16: what gradients are computed times, and how that changes."""
    optimizer: OptimizerConfig = OptimizerConfig()
    router: RouterConfig = RouterConfig()
    """Of a model with experts: losses of its routers, balancing, capacity."""
    experts: ExpertsConfig = ExpertsConfig()
    """Of a model with experts under epN: where they are, and copies of the busiest."""
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        microbatches(self.workload, self.layout, self.execution)
        return self

    @model_validator(mode="after")
    def _loss_scale_acts(self) -> Self:
        if self.loss_scale != LossScaleConfig() and self.dtype != "float16":
            raise ValueError(f"loss_scale does nothing with dtype {self.dtype}; leave it out, or use float16")
        return self

    @property
    def workload(self) -> Workload:
        return Workload(
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            separate_documents=self.separate_documents,
        )

    @property
    def execution(self) -> Execution:
        """With `auto` resolved to a number of rows, and the actions read from their file."""
        return Execution(
            micro_batch=self.microbatch_rows,
            dtype=self.dtype,
            optimizer=self.optimizer,
            router=self.router,
            experts=self.experts,
            loss_scale=self.loss_scale if self.dtype == "float16" else None,
            bucket_mib=self.bucket_mib,
            zero3_gather=self.zero3_gather,
            recompute=self.recompute,
            actions=None if self.actions is None else read_actions(self.actions),
        )

    @property
    def microbatch_rows(self) -> int:
        """Samples in a microbatch. `auto` takes the most rows that divide a data rank's share, stay within
        8192 tokens and, with pp > 1, leave at least 4*pp microbatches; one row where nothing does.
        """
        if self.micro_batch != "auto":
            return self.micro_batch
        share, rest = divmod(self.global_batch, self.layout.dp)
        if rest:
            return 1  # no size fits; the rule for batches says so
        wanted = AUTO_MICROBATCHES_PER_STAGE * self.layout.pp if self.layout.pp > 1 else 1
        most = min(share // wanted, AUTO_MICROBATCH_TOKENS // self.seq_len)
        return max((rows for rows in range(1, most + 1) if share % rows == 0), default=1)


def load_config(path: Path | str | None, overrides: Iterable[str] = ()) -> TrainConfig:
    """Read a YAML file (None: defaults), then change it by `key=value` texts such as `optimizer.lr=3e-4`.

    A value is read as YAML, or as text where it is no YAML (`data=*.txt`). The last change of a key wins.

    Raises: ConfigError in one line: a file that cannot be read, an unknown key (with the nearest valid one),
    a wrong type (with key, value and what is expected). LayoutError and WorkloadError as TrainConfig does.
    """
    where = COMMAND_LINE if path is None else str(path)
    data = {} if path is None else read_file(Path(path))
    _check_keys(data, where)
    changed = set()
    for text in overrides:
        changed.add(_override(data, text))
    if "model" not in data:
        hint = (
            ""
            if path is not None
            else ": name a config first, such as examples/train.yaml, or a model, such as model=tiny-llama"
        )
        raise ConfigError(f"{where}: missing key 'model'{hint}")
    try:
        return TrainConfig.model_validate(data)
    except ValidationError as error:
        where = _place(error, where, changed)
        raise ConfigError(one_line(f"{where}: {describe(error, TrainConfig)}")) from None


def _place(error: ValidationError, where: str, changed: set[str]) -> str:
    """Whether the first fault lies in the file, on the command line, or in how the two go together."""
    loc = [str(part) for part in error.errors()[0]["loc"]]
    if any(".".join(loc[:n]) in changed for n in range(1, len(loc) + 1)):
        return COMMAND_LINE
    section = ".".join(loc)
    if where != COMMAND_LINE and any(key.startswith(f"{section}.") for key in changed):
        return f"{where} and {COMMAND_LINE}"
    return where


def valid_keys() -> list[str]:
    """Every key of a training config, sections dotted: `model`, ..., `optimizer.lr`, ..., `log.every`, ..."""
    keys: list[str] = []
    for name, field in TrainConfig.model_fields.items():
        section = _section(field.annotation)
        keys += [f"{name}.{key}" for key in section.model_fields] if section else [name]
    return keys


def _section(annotation: object) -> type[Value] | None:
    """The class of a nested section; a Layout is one value (a text), not a section."""
    if isinstance(annotation, type) and issubclass(annotation, Value) and annotation is not Layout:
        return annotation
    return None


def _check_keys(data: Mapping[str, Any], where: str) -> None:
    """Refuse unknown keys, at the top or in a section, before their values are looked at."""
    for name, value in data.items():
        field = TrainConfig.model_fields.get(name)
        if field is None:
            raise ConfigError(one_line(_unknown(name, where)))
        section = _section(field.annotation)
        if section is None or not isinstance(value, dict):
            continue
        for key in value:
            if key not in section.model_fields:
                raise ConfigError(one_line(_unknown(f"{name}.{key}", where)))


def _unknown(key: str, where: str) -> str:
    """`lr` means `optimizer.lr`: look for the last word first, then for a likely slip of the hand."""
    keys = valid_keys()
    leaf = key.rpartition(".")[2]
    same_leaf = [known for known in keys if known.rpartition(".")[2] == leaf]
    sections = [name for name, field in TrainConfig.model_fields.items() if _section(field.annotation)]
    hint = f" (did you mean {same_leaf[0]!r}?)" if same_leaf else nearest(key, [*keys, *sections])
    if key in OPTIONS:
        hint = f"; it is an option: --{key}"
    tops = [f"{name}.*" if name in sections else name for name in TrainConfig.model_fields]
    return f"{where}: unknown key {key!r}{hint or '; valid keys: ' + ', '.join(tops)}"


def _override(data: dict[str, Any], text: str) -> str:
    """Apply one `key=value` to `data` and return the key."""
    where = COMMAND_LINE
    key, equals, value_text = text.partition("=")
    key = key.strip()
    if not equals or not key:
        hint = "; a layout of several words is quoted: layout='dp2 tp2'" if _is_layout(text) else ""
        raise ConfigError(
            one_line(f"{where}: expected key=value, such as optimizer.lr=3e-4, got {text!r}{hint}")
        )
    try:
        value = parse(value_text)
    except OverflowError as error:
        raise ConfigError(one_line(f"{where}: {key}: {error} is too long")) from None
    except (yaml.YAMLError, ValueError, RecursionError):
        value = value_text.strip()  # not YAML (`*.txt`): plain text, which the type of the key then judges
    name, dot, rest = key.partition(".")
    _check_keys({name: {rest: value}} if dot else {name: value}, where)
    if not dot:
        data[name] = value
        return key
    if not _section(TrainConfig.model_fields[name].annotation):
        raise ConfigError(f"{where}: unknown key {key!r}: {name} is one value, not a section")
    section = data.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(
            one_line(f"{where}: {key} cannot be set, since the file gives {name} as {section!r}")
        )
    section[rest] = value
    return key


def _is_layout(text: str) -> bool:
    try:
        Layout.parse(text)
    except LayoutError:
        return False
    return True
