"""A local web server with faults that a test can switch on."""

import contextlib
import http.server
import threading


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serve the files of a folder, with optional byte ranges, HEAD, errors and broken connections."""

    def do_HEAD(self):
        self.answer(head=True)

    def do_GET(self):
        self.answer(head=False)

    def answer(self, head):
        site = self.server.site
        site.log.append((self.command, self.path.partition("?")[0], self.headers.get("Range")))
        if head and not site.head:
            return self.send_error(405)
        if self.path in site.redirects:
            self.send_response(302)
            self.send_header("Location", site.redirects[self.path])
            self.end_headers()
            return None
        path = site.folder / self.path.partition("?")[0].lstrip("/")
        if not path.is_file():
            return self.send_error(404)
        if site.failures > 0 and not head:
            site.failures -= 1
            return self.send_error(503)
        if path.suffix == ".tar" and not head and site.allowed is not None:
            site.allowed -= 1
            if site.allowed < 0:
                return self.send_error(503)
        data, start = path.read_bytes(), 0
        if site.ranges and (wanted := self.headers.get("Range")):
            start, end = (int(part) for part in wanted.removeprefix("bytes=").split("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
            data = data[: end + 1]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        if not head:
            rest = data[start:]
            if site.breaks > 0:
                site.breaks -= 1
                rest = rest[: len(rest) // 2]
                self.close_connection = True
            self.wfile.write(rest)
        return None

    def log_message(self, *_):
        pass


class Site:
    """Serve `folder` at `url`; `down` and `up` stop and restart the server at the same port."""

    def __init__(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log, self.redirects = folder, [], {}
        self.ranges, self.head, self.breaks, self.failures = True, True, 0, 0
        self.allowed = None  # how many more tars can be downloaded
        self._port = 0
        self.up()
        self.url = f"http://127.0.0.1:{self._port}"

    def up(self):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self.server.site = self
        self._port = self.server.server_address[1]
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def down(self):
        """Refuse connections."""
        if self._thread is not None:
            self.server.shutdown()
            self._thread.join()
            self.server.server_close()
            self._thread = None

    def fetched(self, name):
        return sum(1 for command, path, _ in self.log if command == "GET" and path.endswith(name))


@contextlib.contextmanager
def serving(folder):
    site = Site(folder)
    try:
        yield site
    finally:
        site.down()
