"""The tool: oracle, rows, implementations, report, stress; `python -m parity_tests.conformance`."""
