"""Router replay: routes of experts, recorded and imposed."""
