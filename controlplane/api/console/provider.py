"""The OpenID provider that people sign in at: authorization code flow with PKCE.

What the provider says of itself is read when it is first needed and kept for ten minutes; its keys are read again as
soon as a token names one that is not known, so that the provider may change them at any time.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import httpx2 as httpx
from authlib.common.security import generate_token
from authlib.integrations.base_client import OAuthError
from authlib.integrations.httpx_client import AsyncOAuth2Client
from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet

from controlplane.errors import TidepoolError
from controlplane.settings import Settings

_KEEP_S = 600.0
_KEYS_ASKED_EVERY_S = 10.0
_TIMEOUT_S = 10.0
_CLOCKS_DIFFER_S = 60
_SIGNATURES = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Of keys that the provider alone has. A token signed with a shared secret, or not at all, is refused."""
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class ProviderError(TidepoolError):
    """The provider refused, failed, or answered something that cannot be trusted."""

    status = 502
    code = "sign_in_failed"


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Where a browser goes to sign in, and what must come back from there."""

    url: str
    state: str
    nonce: str
    verifier: str


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Who signed in, by the claims of a verified token."""

    claims: Mapping[str, Any]
    id_token: str


class OpenIdProvider:
    """The provider of the settings. All that asks it raises ProviderError where it does not answer well."""

    def __init__(self, settings: Settings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        assert settings.oidc_issuer is not None
        self._issuer = settings.oidc_issuer
        self._settings = settings
        self._transport = transport
        self._about: dict[str, Any] = {}
        self._about_until_s = 0.0
        self._keys: KeySet | None = None
        self._keys_asked_s = 0.0

    async def depart(self, redirect_uri: str) -> Departure:
        """Begin to sign in."""
        about = await self._metadata()
        verifier, nonce = generate_token(64), generate_token(32)
        async with self._client(redirect_uri) as client:
            url, state = client.create_authorization_url(
                about["authorization_endpoint"], code_verifier=verifier, nonce=nonce
            )
        return Departure(url=url, state=state, nonce=nonce, verifier=verifier)

    async def arrive(self, query: Mapping[str, str], *, nonce: str, verifier: str, redirect_uri: str) -> Arrival:
        """Who comes back from the provider with this query. The state was compared before."""
        about = await self._metadata()
        sender = query.get("iss")
        if sender is not None and sender != about["issuer"]:
            raise ProviderError("another provider than the one of the settings has answered")
        if "error" in query:
            raise ProviderError(f"the provider refused: {query.get('error_description') or query['error']}")
        if not query.get("code"):
            raise ProviderError("the provider's answer has no code")
        async with self._client(redirect_uri, _secret_place(about)) as client:
            try:
                tokens = await client.fetch_token(
                    about["token_endpoint"],
                    grant_type="authorization_code",
                    code=query["code"],
                    code_verifier=verifier,
                )
            except OAuthError as error:
                raise ProviderError(f"the provider refused the code: {error.description or error.error}") from None
            except (httpx.HTTPError, ValueError) as error:
                raise self._unreachable(error) from None
        id_token = tokens.get("id_token")
        if not isinstance(id_token, str):
            raise ProviderError("the provider sent no ID token: oidc_scopes must contain openid")
        return Arrival(claims=await self._verified(id_token, nonce, tokens.get("access_token")), id_token=id_token)

    async def logout_url(self, id_token: str, back: str) -> str | None:
        """Where the person logs out of the provider too; None: it has no such place."""
        endpoint = (await self._metadata()).get("end_session_endpoint")
        if not isinstance(endpoint, str):
            return None
        query = {"id_token_hint": id_token, "client_id": self._settings.oidc_client_id}
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query | {'post_logout_redirect_uri': back})}"

    async def _verified(self, id_token: str, nonce: str, access_token: str | None) -> CodeIDToken:
        """The claims of an ID token that is the provider's, for us, for this sign-in, and not expired."""
        about = await self._metadata()
        options = {
            "iss": {"essential": True, "value": about["issuer"]},
            "aud": {"essential": True, "value": self._settings.oidc_client_id},
        }
        params = {"nonce": nonce, "client_id": self._settings.oidc_client_id, "access_token": access_token}
        try:
            try:
                token = jwt.decode(id_token, await self._key_set(), algorithms=list(_SIGNATURES))
            except InvalidKeyIdError:
                token = jwt.decode(id_token, await self._key_set(anew=True), algorithms=list(_SIGNATURES))
            claims = CodeIDToken(token.claims, token.header, options, params)
            claims.validate(leeway=_CLOCKS_DIFFER_S)
        except (JoseError, ValueError) as error:
            raise ProviderError(f"the provider's ID token is not valid: {error}") from None
        return claims

    async def _metadata(self) -> dict[str, Any]:
        if time.monotonic() < self._about_until_s:
            return self._about
        about = await self._read(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
        if str(about.get("issuer", "")).rstrip("/") != self._issuer.rstrip("/"):
            raise ProviderError(f"oidc_issuer is {self._issuer}, and the provider calls itself {about.get('issuer')}")
        for name in _ENDPOINTS:
            scheme = self._issuer.partition(":")[0]
            if not str(about.get(name, "")).startswith(("https://", f"{scheme}://")):
                raise ProviderError(f"the provider's {name} is not there, or not protected by TLS")
        self._about, self._about_until_s = about, time.monotonic() + _KEEP_S
        return about

    async def _key_set(self, *, anew: bool = False) -> KeySet:
        may_ask = time.monotonic() - self._keys_asked_s > _KEYS_ASKED_EVERY_S
        if self._keys is None or (anew and may_ask):
            self._keys_asked_s = time.monotonic()
            keys = await self._read((await self._metadata())["jwks_uri"])
            try:
                self._keys = KeySet.import_key_set(keys)  # type: ignore[arg-type]
            except (JoseError, ValueError, KeyError, TypeError) as error:
                raise ProviderError(f"the provider's keys cannot be read: {error}") from None
        return self._keys

    async def _read(self, url: str) -> dict[str, Any]:
        async with httpx.AsyncClient(transport=self._transport, timeout=_TIMEOUT_S) as client:
            try:
                answer = (await client.get(url)).raise_for_status().json()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                raise self._unreachable(error) from None
        if not isinstance(answer, dict):
            raise ProviderError(f"{url} answered no JSON object")
        return answer

    def _client(self, redirect_uri: str, proof: str = "none") -> AsyncOAuth2Client:
        return AsyncOAuth2Client(
            client_id=self._settings.oidc_client_id,
            client_secret=self._settings.oidc_client_secret.get_secret_value() or None,
            token_endpoint_auth_method=proof if self._settings.oidc_client_secret.get_secret_value() else "none",
            scope=self._settings.oidc_scopes,
            redirect_uri=redirect_uri,
            code_challenge_method="S256",
            transport=self._transport,
            timeout=_TIMEOUT_S,
        )

    def _unreachable(self, error: Exception) -> ProviderError:
        return ProviderError(f"the provider {self._issuer} did not answer as it should: {error}")


def _secret_place(about: Mapping[str, Any]) -> str:
    """How the provider wants to see a client's secret."""
    ways = about.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
    return "client_secret_basic" if "client_secret_basic" in ways else "client_secret_post"
