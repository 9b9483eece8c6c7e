"""What is known of a flight before it departs. Yours to change: onejob runs these functions as steps of [data]."""

import polars as pl


def known_before_departure(
    flights: pl.LazyFrame, first: str, last: str, late_after: int = 15
) -> tuple[pl.LazyFrame, dict[str, pl.LazyFrame]]:
    """Flights scheduled from `first` to `last`, with the label and the features that a schedule gives.

    Nothing that is measured later (departure and arrival times, time in the air) is among the features.
    Flights that never arrived have no label: they are dropped, and kept apart with the reason.
    """
    day = pl.date("year", "month", "day")  # the local date: time_hour is UTC, where the evening is the next day already
    asked = flights.filter(day.is_between(pl.lit(first).str.to_date(), pl.lit(last).str.to_date()))

    cancelled = pl.col("dep_time").is_null()
    diverted = pl.col("dep_time").is_not_null() & pl.col("arr_delay").is_null()
    arrived = asked.filter(pl.col("arr_delay").is_not_null()).with_columns(
        late=(pl.col("arr_delay") > late_after).cast(pl.Int8),
        departs=departs(),
        flight_id=pl.format("{}{}-{}-{}", "carrier", "flight", "origin", day),
        weekday=day.dt.strftime("%a"),
        minute_of_day=pl.col("sched_dep_time") // 100 * 60 + pl.col("sched_dep_time") % 100,
    )
    return arrived, {"cancelled": asked.filter(cancelled), "diverted": asked.filter(diverted)}


def departs() -> pl.Expr:
    """The scheduled departure, as a moment: the UTC hour of the schedule plus the minutes, told in New York's time."""
    hour = pl.col("time_hour").str.to_datetime("%Y-%m-%dT%H:%M:%SZ", time_zone="UTC")
    return (hour + pl.duration(minutes="minute")).dt.convert_time_zone("America/New_York")
