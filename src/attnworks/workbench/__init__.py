"""The workbench: prove a kernel right, measure it, count the bytes it moves."""
