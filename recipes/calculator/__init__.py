"""A pretrained model learns an agent: sums and products of reasoning-gym with a calculator, first by examples."""
