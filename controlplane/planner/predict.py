"""When the batches in progress will end: how fast each model's lines complete is measured from run to run."""

from controlplane.policies.batch_ends import (
    ModelSpeed,
    SpeedSample,
    SpeedSettings,
    choose_speed,
    predict_ends,
)
from controlplane.settings import Settings
from controlplane.store.batch_ends import (
    BatchProgress,
    read_progress,
    read_speeds,
    read_takers,
    write_ends,
    write_speeds,
)
from controlplane.store.session import Database


def predict(database: Database, settings: Settings) -> dict[str, int]:
    """Measure, predict and store; the counts of batches in progress, at risk, and predicted anew."""
    with database.transaction(replicated=False) as session:
        before = read_speeds(session)
        progress = read_progress(session)
        speeds = _measured(before, progress)
        write_speeds(session, speeds)
        takers = read_takers(session, alive_s=settings.heartbeat_stale_s)
        ends = predict_ends(progress.groups, _speeds(speeds, takers, progress))
        written = write_ends(session, ends, now_s=progress.now_s)
    return {"running": len(ends), "at_risk": sum(end.at_risk for end in ends.values()), "changed": written}


def _measured(before: dict[str, SpeedSample], progress: BatchProgress) -> dict[str, SpeedSample]:
    """New samples of the models that have, or had, lines to run."""
    busy = {group.model for group in progress.groups}
    was_busy = {model for model, sample in before.items() if sample.busy}
    return {
        model: choose_speed(
            before.get(model),
            finished=progress.finished.get(model, 0),
            busy=model in busy,
            now_s=progress.now_s,
            settings=SpeedSettings(),
        )
        for model in busy | was_busy
    }


def _speeds(
    samples: dict[str, SpeedSample], takers: dict[str, tuple[int, int, float | None]], progress: BatchProgress
) -> dict[str, ModelSpeed]:
    """The measured speeds of models with open lines, and the most that their instances make."""
    speeds = {}
    for model, line_tokens in progress.input_tokens.items():
        taking, starting, tokens_per_s = takers.get(model, (0, 0, None))
        speeds[model] = ModelSpeed(
            per_s=samples[model].per_s if model in samples else None,
            most_per_s=tokens_per_s / line_tokens if tokens_per_s and line_tokens else None,
            taking=taking,
            starting=starting,
        )
    return speeds
