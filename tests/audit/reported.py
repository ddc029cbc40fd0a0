"""Failures that our two studies of other tools list, by the number of their public reports."""

from __future__ import annotations

_NUMBERS = {
    "1Cat-vLLM": "PR#21",
    "DeepSpeed": "#4332 #5195 PR#8130 PR#8148",
    "EasyR1": "PR#11007",
    "Flow-Factory": "#156",
    "GLM-V": "#61",
    "GPTQModel": "#2694",
    "gpustack": "#5438",
    "Impromptu-VLA": "#52",
    "LLaMA-Factory": (
        "#1024 #1411 #1727 #1910 #2075 #2161 #2189 #2505 #2604 #2703 #2789 #2884 #3096 "
        "#3125 #3154 #3238 #3594 PR#3794 #4379 #4896 #4913 #5262 #5489 #5930 #5936 #5939 "
        "#6020 #6105 #6373 #7511 #7665 #7706 #7943 #8241 #8254 #8501 #8635 #9051 #9338 #9346 "
        "PR#9617 #10186 #10230 #10396 #10410 PR#10438 #10596 #10757 PR#10834"
    ),
    "Megatron-Bridge": "#1883 #4107",
    "miles": "PR#1087",
    "MiniCPM-V": "#502",
    "MoE-Infinity": "PR#108",
    "ms-swift": "#6481 #9172",
    "open-instruct": "#427",
    "OpenRLHF": (
        "#58 #87 #157 PR#163 #180 #209 #224 #295 PR#335 #343 #352 #403 #428 #460 #494 "
        "#501 #542 #546 #606 #621 #645 PR#648 #651 #660 #682 #693 #726 #739 #747 PR#869 "
        "#870 #872 #873 PR#891 #920 #928 #970 #973 #991 #997 #1039 #1049 #1067 #1069 "
        "#1081 #1103 #1120 #1126 #1135 #1150 #1153 #1193 #1200 PR#1208 #1225 #1232 "
        "PR#1233 PR#1234 PR#1253 PR#1265 #1311 PR#1316 PR#1333 PR#1337 PR#1342 PR#1343 "
        "PR#1348 PR#1350 PR#1357"
    ),
    "peft": "#453 #1043 #1388 #1443 #1836 #2105 #2321 #2450 #2500 #2603",
    "Relax": "PR#148",
    "sglang": "PR#19850 PR#21864 PR#27381 #35797",
    "TinyLLaVA": "#88",
    "torchtune": "#1101",
    "transformers": "#29303 #40968 #45127 #47254 #48154",
    "trl": "#2514 #4416 #5217 #5312 PR#6356",
    "unsloth": "#1122 #1191 #1521 #1770 #3091 #7792",
    "unsloth-zoo": "PR#810",
    "verl": "#1246 PR#1821 #3087 #4553 PR#5326 #7198 #7285 PR#7453 #7495",
    "verl-omni": "#552",
    "vLLM": (
        "#2386 #2847 #3323 #4186 PR#6758 #6983 #7441 #9280 #15031 #18983 #21500 PR#31849 "
        "#32599 #32718 #34591 PR#36997 PR#41384 #41754 #42008 #49063 #55193 #55545"
    ),
    "xtuner": "PR#2044",
}

REPORTED = frozenset(
    f"{project} {number.replace('PR#', 'PR #')}"
    for project, numbers in _NUMBERS.items()
    for number in numbers.split()
)
"""In the form of `tasks/audit/catalogue`: "OpenRLHF #651", "vLLM PR #6758"."""
