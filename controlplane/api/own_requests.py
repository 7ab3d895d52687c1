"""`GET /v1/requests/{id}`: a tenant looks up how its own requests went."""

from fastapi import APIRouter

from controlplane.api.admin.fields import RequestPath
from controlplane.api.admin.requests import OwnRequest, OwnRequests, nothing_found
from controlplane.api.auth import Client
from controlplane.api.openai.openapi import ERRORS
from controlplane.api.state import SessionDep, StateDep
from controlplane.store.request_log import find_requests

router = APIRouter(prefix="/v1/requests", tags=["interactive"], responses=ERRORS)


@router.get("/{request_id}", summary="How a request went")
def get_own_request(request_id: RequestPath, session: SessionDep, state: StateDep, caller: Client) -> OwnRequests:
    """Requests of the key's tenant with this `x-request-id`, for a day after they ended."""
    rows = find_requests(session, request_id, tenant=caller.tenant)
    if not rows:
        raise nothing_found(request_id, state.settings.request_log_keep_s)
    return OwnRequests(data=[OwnRequest.model_validate(row) for row in rows])
