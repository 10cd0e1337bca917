"""What the hub keeps on disk: its log, the bytes of versions, transfers of them."""
