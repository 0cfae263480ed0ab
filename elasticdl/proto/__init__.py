"""Generated from ``proto/elasticdl.proto`` by ``make proto``; never edited by hand."""
