"""The figures of a report as Vega-Lite charts: the page draws them live, the PNG and SVG files are the same ones."""
