"""plotly.js from the installed package, asked for only when a panel first draws a plot."""

from __future__ import annotations

from pathlib import Path

import plotly
from fastapi import FastAPI
from fastapi.responses import FileResponse

PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"


def add_assets(host: FastAPI) -> None:
    """Serves /assets/plotly.min.js, which browsers keep for a day."""

    @host.get("/assets/plotly.min.js", include_in_schema=False)
    def plotly_js() -> FileResponse:
        return FileResponse(
            PLOTLY, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"}
        )
