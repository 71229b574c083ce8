"""The limits of a query's rate: one budget on the driver's machine, from which all its tasks take."""
