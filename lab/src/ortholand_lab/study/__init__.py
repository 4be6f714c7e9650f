"""What a study is, how it is run, recorded, timed, drawn and reported."""
