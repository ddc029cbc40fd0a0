"""deliver: gather, merge, convert and check a checkpoint (SOURCE) that was made elsewhere.

recognise        find out what SOURCE is: an adapter, a full model, shards, a DeepSpeed checkpoint
examination      audit SOURCE; `handled` lists the errors that do not stop a delivery
plan/            plan every operation before a byte is written
stages           hand the plans to the chain's gather, merge and convert
smoke            measure the reference, and compare the served folder with it
verify_inputs    compare input artifacts with their manifests, byte for byte
publish_output   put the served artifact into OUT in one step
"""
