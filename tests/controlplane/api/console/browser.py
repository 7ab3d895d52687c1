"""A browser at a running API: it keeps cookies, and says where its requests come from as browsers do."""

from typing import Any

import httpx2 as httpx
from fastapi.testclient import TestClient

HERE = "http://testserver"
SECURE = "https://testserver"


class Browser:
    """One browser, which shows a page of the console; requests of other pages have other headers."""

    def __init__(self, api: TestClient, origin: str = HERE) -> None:
        self.origin = origin
        self.http = httpx.Client(transport=api._transport, base_url=origin)
        self.csrf: str | None = None

    def ask(self, method: str, path: str, *, status: int = 200, **request: Any) -> Any:
        """The JSON of an answer that has that status, to a request of the console's page."""
        answer = self.send(method, path, **request)
        assert answer.status_code == status, answer.text
        if status >= 400 and not path.startswith("/v1/"):
            assert answer.headers["content-type"] == "application/problem+json", answer.headers
        return answer.json()

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        """The answer to a request of the console's page; `headers` change what it says, None takes one away."""
        headers = {"Sec-Fetch-Site": "same-origin", "X-CSRF-Token": self.csrf}
        if method not in {"GET", "HEAD"}:
            headers["Origin"] = self.origin
        headers |= request.pop("headers", {})
        told = {name: value for name, value in headers.items() if value is not None}
        return self.http.request(method, path, headers=told, **request)

    def sign_in(self, key: str) -> Any:
        """Sign in with a key; the page keeps the CSRF token."""
        return self.keep(self.ask("POST", "/ui/session", json={"key": key}))

    def keep(self, session: Any) -> Any:
        """Keep the CSRF token of a session."""
        self.csrf = session["csrf_token"]
        return session

    @property
    def cookie(self) -> tuple[str, str]:
        """The session's cookie: its name and its value."""
        (cookie,) = [cookie for cookie in self.http.cookies.jar if "session" in cookie.name]
        return cookie.name, cookie.value or ""
