"""What runs beside an engine: it follows the weight hub and brings new versions into the engine."""
