"""Logs as JSON, one object a line."""

import datetime
import json
import logging
import sys

_OWN_FIELDS = {*logging.makeLogRecord({}).__dict__, "message", "asctime"}  # the last two come from other formatters


class JsonLines(logging.Formatter):
    """`time`, `level`, `event`, what `extra` adds, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields = {"time": time.isoformat(timespec="milliseconds"), "level": record.levelname.lower(),
                  "event": record.getMessage()}
        fields |= {key: value for key, value in record.__dict__.items() if key not in _OWN_FIELDS}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def log_to_stderr() -> None:
    """Our own events from INFO on, everybody else's from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("serving").setLevel(logging.INFO)
