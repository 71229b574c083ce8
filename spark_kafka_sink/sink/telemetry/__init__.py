"""OpenTelemetry: spans and metrics of batches, tasks and producers. Imported only with telemetry.opentelemetry=true."""
