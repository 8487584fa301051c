"""Ways into TileOps from other libraries, each of which is imported when its module is used."""
