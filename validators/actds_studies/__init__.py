"""Studies: what is found in the rows of datasets. They stand on the validators, nobody on them."""
