"""As much of an S3 server as `store.blobs.bucket` asks for, in memory. Its behaviour is that of moto's server, which
the same tests have been run against.
"""

from dataclasses import dataclass, field
from email.utils import formatdate
from hashlib import md5
from xml.etree import ElementTree

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


@dataclass
class Bucket:
    """One bucket. `written`: keys to bytes and unix time; `asked`: every request; `failing`: the status of all answers;
    `body_max`: the largest body of a request.
    """

    name: str = "tide"
    written: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    failing: int | None = None
    body_max: int = 0
    now_s: float = 1e9

    def app(self) -> Starlette:
        """The server."""
        methods = ["GET", "HEAD", "PUT", "POST", "DELETE"]
        return Starlette(routes=[Route("/{bucket}/{key:path}", self._any, methods=methods),
                                 Route("/{bucket}", self._any, methods=methods)])  # fmt: skip

    async def _any(self, request: Request) -> Response:
        key, query = request.path_params.get("key", ""), request.query_params
        self.asked.append((request.method, request.url.query))
        body = await request.body()
        self.body_max = max(self.body_max, len(body))
        if self.failing is not None:
            return _fault(self.failing, "Broken")
        if request.path_params["bucket"] != self.name:
            return _fault(404, "NoSuchBucket")
        if "AWS4-HMAC-SHA256" not in request.headers.get("authorization", ""):
            return _fault(403, "AccessDenied")
        if not key:
            return self._listed(query.get("prefix", ""))
        if request.method == "POST":
            return self._multipart(key, query.get("uploadId"))
        if request.method == "PUT":
            return self._put(key, body, query.get("uploadId"), query.get("partNumber", ""))
        if request.method == "DELETE":
            self.written.pop(key, None)
            return Response(status_code=204)
        return self._read(key, request.headers.get("range"))

    def _put(self, key: str, body: bytes, upload: str | None, part: str) -> Response:
        if upload is None:
            self.written[key] = (body, self.now_s)
        else:
            self.parts[upload][int(part)] = body
        return Response(headers={"etag": _etag(body)})

    def _multipart(self, key: str, upload: str | None) -> Response:
        if upload is None:
            upload = f"upload-{len(self.parts)}"
            self.parts[upload] = {}
            return _xml("InitiateMultipartUploadResult", UploadId=upload, Key=key, Bucket=self.name)
        content = b"".join(part for _, part in sorted(self.parts.pop(upload).items()))
        self.written[key] = (content, self.now_s)
        return _xml("CompleteMultipartUploadResult", Key=key, Bucket=self.name, ETag=_etag(content), Location=key)

    def _read(self, key: str, wanted: str | None) -> Response:
        if key not in self.written:
            return _fault(404, "NoSuchKey")
        content, at_s = self.written[key]
        about = {"last-modified": formatdate(at_s, usegmt=True), "etag": _etag(content)}
        if wanted is None:
            return Response(content, headers=about)
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        about["content-range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        return Response(content[first : last + 1], status_code=206, headers=about)

    def _listed(self, prefix: str) -> Response:
        root = ElementTree.Element("ListBucketResult")
        for key, (content, _) in sorted(self.written.items()):
            if key.startswith(prefix):
                entry = ElementTree.SubElement(root, "Contents")
                told = {"Key": key, "Size": len(content), "LastModified": "2001-09-09T01:46:40.000Z", "ETag": "x"}
                for name, value in told.items():
                    ElementTree.SubElement(entry, name).text = str(value)
        return Response(ElementTree.tostring(root), media_type="application/xml")


def _etag(content: bytes) -> str:
    return f'"{md5(content, usedforsecurity=False).hexdigest()}"'


def _xml(name: str, **fields: str) -> Response:
    root = ElementTree.Element(name)
    for field_name, value in fields.items():
        ElementTree.SubElement(root, field_name).text = value
    return Response(ElementTree.tostring(root), media_type="application/xml")


def _fault(status: int, code: str) -> Response:
    answer = _xml("Error", Code=code, Message=code)
    answer.status_code = status
    return answer
