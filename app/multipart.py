"""The one file of a form upload, taken piece by piece as it comes over the wire."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.incoming import Incoming

_FORM = "send one file as multipart/form-data, as `curl -F file=@picture.png` does"


async def receive(request: Request, begin: Callable[[str], Incoming]) -> Incoming:
    """The file of the request's form, whole; the caller keeps or forgets it with its `with` block.

    begin: makes the Incoming of a file name. Raises ValueError for anything but one file, and what
    Incoming.write raises; then nothing is left of it.
    """
    with _Form(request.headers.get("content-type", ""), begin) as form:
        async for chunk in request.stream():
            await run_in_threadpool(form.feed, chunk)
        return form.take()


class _Form:
    """Parses a multipart body; what is not taken at the end is forgotten."""

    def __init__(self, content_type: str, begin: Callable[[str], Incoming]) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise ValueError(f"the upload is no form; {_FORM}")
        self._begin = begin
        self._incoming: Incoming | None = None
        self._ended = self._writing = False
        self._header, self._value, self._disposition = b"", b"", b""
        self._parser = MultipartParser(  # limits the headers of a part itself
            options[b"boundary"],
            {
                "on_part_begin": self._on_part,
                "on_header_field": self._on_field,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_end": self._on_end,
            },
        )

    def __enter__(self) -> _Form:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._incoming is not None:
            self._incoming.__exit__(kind, error, _)

    def feed(self, chunk: bytes) -> None:
        """Parses one piece; file data goes straight to the disk."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise ValueError(f"the upload is damaged ({error}); {_FORM}") from error

    def take(self) -> Incoming:
        """The file; ValueError if the form broke off or had none."""
        if not self._ended:
            raise ValueError("the upload broke off before its end; send it again")
        if self._incoming is None:
            raise ValueError(f"the form holds no file; {_FORM}")
        taken, self._incoming = self._incoming, None
        return taken

    def _on_part(self) -> None:
        self._writing, self._disposition = False, b""
        self._header, self._value = b"", b""

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def _on_headers(self) -> None:
        name = parse_options_header(self._disposition)[1].get(b"filename")
        if name is None:
            return  # an ordinary field
        if self._incoming is not None:
            raise ValueError(f"the form holds several files; {_FORM}")
        self._incoming = self._begin(name.decode("utf-8", "replace"))
        self._writing = True

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._writing and self._incoming is not None:
            self._incoming.write(data[start:end])

    def _on_end(self) -> None:
        self._ended = True
