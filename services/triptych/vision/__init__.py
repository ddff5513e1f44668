"""Pictures: intake, preprocessing, identity, the encoder and its cache; and the export of encoders for Triton."""
