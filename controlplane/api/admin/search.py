"""Search by name over what the fleet is made of."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from controlplane.api.auth import Viewer
from controlplane.api.state import SessionDep
from controlplane.store.search import find_names

router = APIRouter(tags=["admin: fleet"])


class Found(BaseModel):
    """One thing whose name contains the words."""

    kind: Literal["model", "region", "node", "tenant"]
    name: str


class FoundList(BaseModel):
    """What was found, of each kind at most as many as asked for."""

    data: list[Found]


@router.get("/search", summary="Search by name")
def search(
    session: SessionDep,
    _: Viewer,
    words: Annotated[str, Query(min_length=1, max_length=200, pattern=r"^[^\x00]*$", description="part of a name")],
    limit: Annotated[int, Query(ge=1, le=50, description="of each kind")] = 10,
) -> FoundList:
    """Models, regions, nodes and tenants whose name contains the words, in any case; those that begin so come first."""
    found = find_names(session, words, limit=limit)
    return FoundList(data=[Found(kind=kind, name=name) for kind, name in found])
