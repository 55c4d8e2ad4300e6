"""Language identification: sentences of many languages, and the laws of its probabilities."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transduce.data.language_identification import LanguageIdentifier, identify
from transduce.errors import InputError

SENTENCES = {
    "en": "The children are playing in the garden because the sun is shining today.",
    "de": "Die Kinder spielen im Garten, weil heute die Sonne scheint.",
    "fr": "Les enfants jouent dans le jardin parce que le soleil brille aujourd'hui.",
    "es": "Los niños juegan en el jardín porque hoy brilla el sol.",
    "it": "I bambini giocano nel giardino perché oggi splende il sole.",
    "pt": "As crianças brincam no jardim porque hoje o sol está brilhando.",
    "nl": "De kinderen spelen in de tuin omdat de zon vandaag schijnt.",
    "sv": "Barnen leker i trädgården eftersom solen skiner idag.",
    "pl": "Dzieci bawią się w ogrodzie, bo dzisiaj świeci słońce.",
    "cs": "Děti si hrají na zahradě, protože dnes svítí slunce.",
    "fi": "Lapset leikkivät puutarhassa, koska aurinko paistaa tänään.",
    "tr": "Çocuklar bahçede oynuyor çünkü bugün güneş parlıyor.",
    "ru": "Дети играют в саду, потому что сегодня светит солнце.",
    "uk": "Діти граються в саду, бо сьогодні світить сонце.",
    "el": "Τα παιδιά παίζουν στον κήπο γιατί σήμερα λάμπει ο ήλιος.",
    "ja": "今日は天気がいいので、子供たちは庭で遊んでいます。",
    "zh": "今天阳光明媚，孩子们在花园里玩。",
    "ko": "오늘은 햇볕이 좋아서 아이들이 정원에서 놀고 있습니다.",
    "ar": "يلعب الأطفال في الحديقة لأن الشمس مشرقة اليوم.",
    "hi": "आज धूप निकली है इसलिए बच्चे बगीचे में खेल रहे हैं।",
}


@pytest.mark.parametrize("language", SENTENCES)
def test_a_sentence_is_of_its_language_among_all(language: str) -> None:
    assert identify(SENTENCES[language], list(SENTENCES))[0].language == language


@given(st.text(max_size=40), st.permutations(["en", "de", "zh", "tlh", "pt-BR"]))
def test_confidences_are_a_distribution_over_the_candidates(text: str, candidates: list[str]) -> None:
    found = identify(text, candidates)
    assert sorted(one.language for one in found) == sorted(candidates)
    assert sum(one.confidence for one in found) == pytest.approx(1)
    assert [one.confidence for one in found] == sorted((one.confidence for one in found), reverse=True)


def test_a_text_without_letters_is_of_the_first_candidate_with_no_confidence() -> None:
    assert [(one.language, one.confidence) for one in identify("123", ["de", "en"])] == [("de", 0.5), ("en", 0.5)]


SAMPLES = {
    "en": "the house is on the hill and the dog sleeps there\nwe want to go home before it rains\n"
    "she has never seen the sea but she likes the water\nhow much does this cost and when will it be here\n"
    "they were talking about the weather while he was reading",
    "de": "das Haus steht auf dem Berg und der Hund schläft dort\nwir wollen nach Hause gehen bevor es regnet\n"
    "sie hat das Meer nie gesehen aber sie mag das Wasser\nwie viel kostet das und wann wird es hier sein\n"
    "sie sprachen über das Wetter während er las",
    "fr": "la maison est sur la colline et le chien y dort\nnous voulons rentrer avant qu'il ne pleuve\n"
    "elle n'a jamais vu la mer mais elle aime l'eau\ncombien cela coûte et quand sera-t-il ici\n"
    "ils parlaient du temps pendant qu'il lisait",
    "ru": "дом стоит на холме и собака спит там\nмы хотим пойти домой до дождя\nона никогда не видела море\n"
    "сколько это стоит и когда это будет здесь",
}
HELD_OUT = {
    "en": ["the children are playing with their friends", "this is what I was looking for", "there are two of them"],
    "de": ["die Kinder spielen mit ihren Freunden", "das ist es was ich gesucht habe", "es gibt zwei davon"],
    "fr": ["les enfants jouent avec leurs amis", "c'est ce que je cherchais", "il y en a deux"],
    "ru": ["дети играют со своими друзьями", "это то что я искал", "их там два"],
}


@pytest.fixture(scope="module")
def identifier() -> LanguageIdentifier:
    return LanguageIdentifier.train({name: text.splitlines() for name, text in SAMPLES.items()})


def test_languages_of_held_out_sentences(identifier: LanguageIdentifier) -> None:
    for language, texts in HELD_OUT.items():
        assert identifier.languages(texts) == [language] * len(texts)


def test_scores_do_not_depend_on_the_other_texts(identifier: LanguageIdentifier) -> None:
    texts = [*HELD_OUT["en"], "", *HELD_OUT["ru"]]
    whole = identifier.scores(texts)
    for row, text in enumerate(texts):
        assert whole[row] == pytest.approx(identifier.scores([text])[0], abs=1e-9)


def test_a_saved_identifier_is_the_same(identifier: LanguageIdentifier, tmp_path: Path) -> None:
    identifier.save(tmp_path / "languages.bin")
    loaded = LanguageIdentifier.load(tmp_path / "languages.bin")
    assert loaded.names == identifier.names
    assert (loaded.log_probs == identifier.log_probs).all()


def test_one_language_cannot_be_told_from_none() -> None:
    with pytest.raises(InputError, match="samples of de"):
        LanguageIdentifier.train({"de": ["ein Haus"]})
    with pytest.raises(InputError, match="samples of de, en"):
        LanguageIdentifier.train({"de": ["ein Haus"], "en": [" "]})


def test_languages_without_a_sample_are_known_by_their_words() -> None:
    known = ["en", "de", "fr", "es", "ru", "pl"]
    identifier = LanguageIdentifier.train({name: LanguageIdentifier.known_words(name) for name in known})
    assert identifier.languages([SENTENCES[name] for name in known]) == known
    with pytest.raises(InputError, match="no profile of the language 'tlh'"):
        LanguageIdentifier.known_words("tlh")
