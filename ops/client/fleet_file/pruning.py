"""What to delete of that which a file made before and names no more: a pure comparison."""

from collections.abc import Mapping, Sequence

from ops.client.api import Api
from ops.client.fleet_file.changes import Change, is_adapter, references_of
from ops.client.fleet_file.resources import ENDPOINT, KINDS, Resources

_NAMED_MAX = 3


def choose_deletions(
    present: Resources, declared: Resources, *, owner: str, open_batches: Mapping[str, Sequence[str]]
) -> list[Change]:
    """Deletions of what belongs to `owner` and is not declared: users first, then what they use. What has a user that
    stays is refused, and so is the last endpoint of a model that `open_batches` (ids by model) ask for.
    """
    order = {kind.name: at for at, kind in enumerate(KINDS)}
    leaving = {key: each for key, each in present.items() if each.owner == owner and key not in declared}
    staying = {**present, **declared}
    changes: list[Change] = []
    offered = {key[1][0] for key in staying if key[0] == ENDPOINT.name and key not in leaving}
    for key, resource in sorted(leaving.items(), key=lambda item: (-order[item[0][0]], not is_adapter(item[1]))):
        users = [
            user.title
            for each, user in staying.items()
            if each != key and any((kind.name, used) == key for kind, used in references_of(user))
        ]
        refused = f"it is needed by {_names(users)}, which stays" if users else None
        model = resource.key[0]
        if refused is None and resource.kind is ENDPOINT and model not in offered and open_batches.get(model):
            refused = f"open batches ask for {model}: {_names(open_batches[model])}; let them end, or cancel them"
        if refused is None:
            del staying[key]
        changes.append(Change(before=resource, after=None, refused=refused))
    return changes


def read_open_batches(api: Api, present: Resources, *, owner: str) -> dict[str, list[str]]:
    """Ids of the open batches that ask for the models of an owner's endpoints."""
    models = {each.key[0] for each in present.values() if each.kind is ENDPOINT and each.owner == owner}
    return {
        model: [batch["id"] for batch in api.pages("/admin/batches", model=model, ended=False)["data"]]
        for model in sorted(models)
    }


def _names(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
