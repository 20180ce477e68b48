"""The base class of the `EarlyStopping` of all frameworks."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping
from typing import Any, ClassVar

from heldin.early_stopping import EarlyStopping
from heldin.errors import HeldinError
from heldin.rules.inputs import RunInputs
from heldin.rules.options import Auto, Evidence, Folds, Rule, resolve
from heldin.rules.outcome import OUTPUTS, OutputOptions
from heldin.rules.progress import is_main_process
from heldin.rules.results import RunResults

from .arguments import strict_kwargs
from .patches import Patches
from .session import Session

__all__ = ["FrameworkStopping"]

PLAIN_ONLY = (  # arguments of loops without a framework
    "model", "optimizer", "loss_fn", "data", "batch_loss", "clip", "sample_weight",
    "process_group", "train_step", "state", "averaged_model", "verify",
)  # fmt: skip
REFUSED = {
    "LeaveOneOut": "needs the tensors of all rows and a loss of (outputs, targets)",
    "Validation": "is what the framework's own early stopping does",
}


class FrameworkStopping(RunResults):
    """Base of the `EarlyStopping` of a framework.

    Args:
        rule: "auto", "folds", "shadow", "evidence", or one of `heldin.rules` (Auto, Folds,
            Evidence).
        restore: put the weights of the best estimate into the model at the end.
        verbose: print one line when a run ends: what was chosen, why it stopped, what to expect.
        log_groups: also log the value of each group of parameters, for evidence.
        options: see `heldin.EarlyStopping`; on_check is called with this callback.
    """

    name: ClassVar[str] = "EarlyStopping"  # for messages
    _harmless: ClassVar[tuple[type[BaseException], ...]] = ()  # that end the framework's loop

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._owner = cls.name

    @strict_kwargs(extends=EarlyStopping.__init__, without=PLAIN_ONLY)
    def __init__(
        self,
        rule: str | Rule = "auto",
        *,
        restore: bool = True,
        verbose: bool = True,
        log_groups: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._set_outputs({name: options.pop(name) for name in OUTPUTS})
        options |= {"restore": restore, "verbose": verbose, "log_groups": log_groups}
        vars(self).update(options, rule=rule)
        self._run: Any = self.make_session()
        self._patches = Patches(self._end, self._harmless)

    def _set_outputs(self, options: dict[str, Any]) -> None:
        """Store the arguments about outputs; some have the name of a result."""
        self._options = options

    def _output_options(self) -> dict[str, Any]:
        """Return the arguments about outputs."""
        return self._options

    @property
    def by_evidence(self) -> bool:
        """Whether the rule is evidence."""
        rule = vars(self)["rule"]
        return rule == "evidence" or isinstance(rule, Evidence)

    def make_session(self) -> Session:
        """Return the session that follows a run by the rule; refuse wrong arguments."""
        values = vars(self)
        rule = resolve(values["rule"], values["budget"], values["memory"])
        if not isinstance(rule, (Auto, Folds, Evidence)):
            name, module = type(rule).__name__, type(rule).__module__
            why = REFUSED.get(name) if module.startswith("heldin.") else None
            raise HeldinError(
                f"{self.name}: {'heldin.rules' if why else module}.{name} "
                f"{why or 'is a rule that frameworks do not follow'}; use 'auto', 'folds', "
                "'shadow' or 'evidence' here, or heldin.EarlyStopping in a loop of your own"
            )
        parameters = inspect.signature(FrameworkStopping.__init__).parameters
        outputs = self._output_options()
        arguments = {n: v for n, v in {**values, **outputs}.items() if n in parameters}
        rule.refuse_unused(self.name, arguments, {n: p.default for n, p in parameters.items()})
        restore, log_groups = values["restore"], values["log_groups"]
        if not isinstance(restore, bool):
            raise HeldinError(f"{self.name}: restore must be True or False, got {restore!r}")
        if isinstance(rule, Evidence) and not restore:
            raise HeldinError(
                f"{self.name}: restore has no effect with rule='evidence', which stops at the "
                "weights that are kept; leave it out"
            )
        if log_groups and not isinstance(rule, Evidence):
            raise HeldinError(f"{self.name}: log_groups is for rule='evidence'; leave it out")
        arguments["on_check"] = self._bound_on_check(values["on_check"])
        names = RunInputs.__dataclass_fields__ & arguments.keys()
        return Session(
            self.name,
            rule,
            RunInputs(
                None,
                None,
                outputs=OutputOptions(self.name, **outputs),
                owner=self.name,
                **{name: arguments[name] for name in names},
            ),
            restore=restore,
            log_groups=log_groups,
        )

    # -- the run

    def _conclude(self) -> dict[str, float]:
        """Put the best weights into the model, say how the run ended, and return its summary."""
        running = self._run.running
        self._run.finish()
        if not running:
            return {}
        message, values = self.conclusion, self.summary()  # in every process
        if vars(self)["verbose"] and is_main_process():
            self._show(f"{self.name.rpartition('.')[2]}: {message}")
        return values

    def _end(self) -> None:
        """End the run, also after an error, and leave nothing behind."""
        self._run.end()
        self._patches.close()

    def _show(self, message: str) -> None:
        """Print a line, unless the framework was told to be silent."""
        print(message)

    def __repr__(self) -> str:
        name, values = self.name.rpartition(".")[2], {**vars(self), **self._output_options()}
        if self._followed() is not None:
            return f"<{name}({values['rule']!r}): {self.conclusion}>"
        parameters = inspect.signature(type(self).__init__).parameters.items()
        changed = {
            n: values[n] for n, p in parameters if n in values and values[n] is not p.default
        }
        return f"{name}({', '.join(f'{n}={reprlib.repr(v)}' for n, v in changed.items())})"

    # -- results

    @property
    def stopping(self) -> Any:
        """The rule of the last run, with its history."""
        return self._followed()

    def _followed(self) -> Any:
        return None if self._run is None else self._run.stopping

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, to be saved with that of the model."""
        state: dict[str, Any] = self._run.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where the state was taken: now, or when the next run begins."""
        self._run.load_state_dict(state_dict)
